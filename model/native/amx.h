// The bf16 matrix kernel on tile registers (Intel AMX): sixteen rows by up to 64 columns at once, the same packed strips.
// A row's sums run along the depth in one order that no other row changes, so the rule of vector.h holds here too.
// With RANKER_EMULATE_AMX the tile instructions are emulated, so that the indexing can be tested on any machine.
#pragma once

#include <type_traits>

#include "vector.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#define RANKER_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(RANKER_EMULATE_AMX)
#define RANKER_AMX 1
#include <cstdlib>
#endif

namespace ranker {

inline bool amx_enabled = false;  // set once, before the first product: the two kernels round differently

#if defined(RANKER_AMX)

constexpr long TILE_ROWS = 16, TILE_DEPTH = 32;

struct alignas(64) TileShapes {  // what `ldtilecfg` reads
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64, "as the processor reads it");

#if defined(RANKER_EMULATE_AMX)
struct EmulatedTile {
    alignas(64) std::uint8_t bytes[16][64];
};
inline thread_local TileShapes shapes;
inline thread_local EmulatedTile tiles[8];
inline void tile_shapes(const TileShapes* wanted) {  // a processor refuses a shape beyond its tiles
    for (int t = 0; t < 8; ++t)
        if (wanted->rows[t] > TILE_ROWS || wanted->row_bytes[t] > 64) std::abort();
    shapes = *wanted;
}
inline void tile_shapes_now(TileShapes* found) { *found = shapes; }
inline void tile_load(int t, const void* base, long stride) {
    for (int r = 0; r < shapes.rows[t]; ++r)
        std::memcpy(tiles[t].bytes[r], static_cast<const char*>(base) + r * stride, shapes.row_bytes[t]);
}
inline void tile_store(int t, void* base, long stride) {
    for (int r = 0; r < shapes.rows[t]; ++r)
        std::memcpy(static_cast<char*>(base) + r * stride, tiles[t].bytes[r], shapes.row_bytes[t]);
}
inline void tile_clear(int t) { std::memset(tiles[t].bytes, 0, sizeof tiles[t].bytes); }
inline void tile_multiply(int c, int a, int b) {
    for (int m = 0; m < shapes.rows[c]; ++m)
        for (int n = 0; n < shapes.row_bytes[c] / 4; ++n) {
            float sum;
            std::memcpy(&sum, &tiles[c].bytes[m][4 * n], 4);
            for (int k = 0; k < shapes.row_bytes[a] / 2; ++k) {
                bf16 left, right;
                std::memcpy(&left, &tiles[a].bytes[m][2 * k], 2);
                std::memcpy(&right, &tiles[b].bytes[k / 2][4 * n + 2 * (k % 2)], 2);
                sum += widen(left) * widen(right);
            }
            std::memcpy(&tiles[c].bytes[m][4 * n], &sum, 4);
        }
}
inline bool amx_permitted() { return true; }
#else
#define tile_shapes(wanted) _tile_loadconfig(wanted)
#define tile_shapes_now(found) _tile_storeconfig(found)
#define tile_load(t, base, stride) _tile_loadd(t, base, stride)
#define tile_store(t, base, stride) _tile_stored(t, base, stride)
#define tile_clear(t) _tile_zero(t)
#define tile_multiply(c, a, b) _tile_dpbf16ps(c, a, b)
inline bool amx_permitted() {  // Linux hands the large tile state out on request, once for the process
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

// Tiles 0-3 hold sums, 4 and 5 a full step of a and b, 6 and 7 the last step where the depth leaves one.
// A thread remembers its shapes. Others on the same thread, such as torch's own products, may have set or released them since.
inline thread_local TileShapes shaped;
inline thread_local long shaped_as = -1;

inline void look_at_tiles() {
    alignas(64) TileShapes found;
    tile_shapes_now(&found);
    if (std::memcmp(&found, &shaped, sizeof found) != 0) shaped_as = -1;
}

inline void shape_tiles(long rows, long rest) {
    if (shaped_as == rows * TILE_DEPTH + rest) return;
    TileShapes wanted;
    for (int t = 0; t < 4; ++t) wanted.rows[t] = std::uint8_t(rows), wanted.row_bytes[t] = 64;
    wanted.rows[4] = wanted.rows[6] = std::uint8_t(rows);
    wanted.row_bytes[4] = wanted.row_bytes[5] = wanted.row_bytes[7] = 64;
    wanted.rows[5] = TILE_DEPTH / 2;
    wanted.row_bytes[6] = std::uint16_t(2 * (rest ? rest : TILE_DEPTH));
    wanted.rows[7] = std::uint8_t((rest ? rest : TILE_DEPTH) / 2);
    tile_shapes(&wanted);
    shaped = wanted;
    shaped_as = rows * TILE_DEPTH + rest;
}

#define RANKER_EACH_COLUMN(action)    \
    do {                              \
        action(0);                    \
        if constexpr (V > 1) action(1); \
        if constexpr (V > 2) action(2); \
        if constexpr (V > 3) action(3); \
    } while (false)

template <int V, bool ADD>
void tile_panel(const bf16* a, long a_stride, long rows, const bf16* b, long depth, float* c, long c_stride) {
    const long rest = depth % TILE_DEPTH, full = depth - rest;
    look_at_tiles();
    for (; rows > 0; rows -= TILE_ROWS, a += TILE_ROWS * a_stride, c += TILE_ROWS * c_stride) {
        shape_tiles(rows < TILE_ROWS ? rows : TILE_ROWS, rest);
#define RANKER_BEGIN(j)                                    \
    do {                                                   \
        if constexpr (ADD)                                 \
            tile_load(j, c + j * GRAIN, c_stride * 4);     \
        else                                               \
            tile_clear(j);                                 \
    } while (false)
        RANKER_EACH_COLUMN(RANKER_BEGIN);
        for (long k = 0; k < full; k += TILE_DEPTH) {
            tile_load(4, a + k, a_stride * 2);
#define RANKER_STEP(j)                                           \
    do {                                                         \
        tile_load(5, b + k * GRAIN * V + j * 2 * GRAIN, V * 64); \
        tile_multiply(j, 4, 5);                                  \
    } while (false)
            RANKER_EACH_COLUMN(RANKER_STEP);
        }
        if (rest) {
            tile_load(6, a + full, a_stride * 2);
#define RANKER_LAST(j)                                              \
    do {                                                            \
        tile_load(7, b + full * GRAIN * V + j * 2 * GRAIN, V * 64); \
        tile_multiply(j, 6, 7);                                     \
    } while (false)
            RANKER_EACH_COLUMN(RANKER_LAST);
        }
#define RANKER_END(j) tile_store(j, c + j * GRAIN, c_stride * 4)
        RANKER_EACH_COLUMN(RANKER_END);
    }
}

// Turns the tile kernel on when the system grants it and it agrees with the vector kernel, remainders included.
inline bool enable_amx() {
    static bool tried = false;
    if (tried) return amx_enabled;
    tried = true;
    if (!amx_permitted()) return false;
    constexpr long ROWS_TRIED = 23, DEPTH = 80;
    static bf16 a[ROWS_TRIED * DEPTH], b[DEPTH * STRIP];
    static float plain[ROWS_TRIED * STRIP], tiled[ROWS_TRIED * STRIP];
    for (long i = 0; i < ROWS_TRIED * DEPTH; ++i) a[i] = narrow<bf16>(float(i * 37 % 101) / 50 - 1);
    for (long i = 0; i < DEPTH * STRIP; ++i) b[i] = narrow<bf16>(float(i * 53 % 97) / 48 - 1);
    panel<bf16, ACROSS, false>(a, DEPTH, ROWS_TRIED, b, DEPTH, plain, STRIP);
    tile_panel<STRIP / GRAIN, false>(a, DEPTH, ROWS_TRIED, b, DEPTH, tiled, STRIP);
    tile_panel<STRIP / GRAIN, true>(a, DEPTH, ROWS_TRIED, b, DEPTH, tiled, STRIP);
    for (long i = 0; i < ROWS_TRIED * STRIP; ++i) {
        const float error = tiled[i] - 2 * plain[i];
        if (!(error < 1e-3f && error > -1e-3f)) return false;
    }
    return amx_enabled = true;
}

#else
inline bool enable_amx() { return false; }
#endif

// c[rows, N] (+)= a[rows, depth] * b for one strip of N columns: tiles where they are on, vectors elsewhere.
template <class T, int N, bool ADD>
inline void product(const T* a, long a_stride, long rows, const T* b, long depth, float* c, long c_stride) {
#if defined(RANKER_AMX)
    if constexpr (std::is_same_v<T, bf16>)
        if (amx_enabled) return tile_panel<N / GRAIN, ADD>(a, a_stride, rows, b, depth, c, c_stride);
#endif
    panel<T, N / LANES, ADD>(a, a_stride, rows, b, depth, c, c_stride);
}

// c[rows, columns] = a[rows, depth] * b, b packed in strips (columns is a multiple of 64).
template <class T>
void multiply(const T* a, long a_stride, long rows, const T* b, long depth, long columns, float* c, long c_stride) {
    for (long j = 0; j < columns; j += STRIP, b += depth * STRIP)
        product<T, STRIP, false>(a, a_stride, rows, b, depth, c + j, c_stride);
}

// c[rows, columns] += a[rows, depth] * b: b packed in strips, the last as wide as is left of `columns` (a multiple of 16).
template <class T>
void accumulate(const T* a, long a_stride, long rows, const T* b, long depth, long columns, float* c, long c_stride) {
    for (long j = 0; j < columns; j += STRIP, b += depth * STRIP) {
        const long left = columns - j;
        if (left >= STRIP)
            product<T, STRIP, true>(a, a_stride, rows, b, depth, c + j, c_stride);
        else if constexpr (STRIP > GRAIN)
            switch (left / GRAIN) {
                case 3: product<T, 3 * GRAIN, true>(a, a_stride, rows, b, depth, c + j, c_stride); break;
                case 2: product<T, 2 * GRAIN, true>(a, a_stride, rows, b, depth, c + j, c_stride); break;
                case 1: product<T, GRAIN, true>(a, a_stride, rows, b, depth, c + j, c_stride); break;
            }
    }
}

}  // namespace ranker
