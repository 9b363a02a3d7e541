// Vectors of the width that the processor has, and the matrix kernel that everything is made of. Nothing here knows the model.
//
// Isolation rests on one rule: the number a row gets is a fixed sequence of operations on that row alone. No
// reduction is ever split or reordered by how many rows, keys or threads there are. Compiled with -ffp-contract=off,
// so that nothing becomes an fma but what is written as one here. Sums along a row are sixteen running sums whatever the
// width, and a product is one chain of fma, so that fp32 has the same bits at every width that has an fma.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace ranker {

#if defined(__AVX512F__)
constexpr const char* VECTORS = "avx512";
constexpr long LANES = 16, ACROSS = 4;  // floats of a vector, and vectors of a kernel call: 6 x 4 sums, 4 columns, a broadcast
#elif defined(__AVX2__) && defined(__FMA__)
constexpr const char* VECTORS = "avx2";
constexpr long LANES = 8, ACROSS = 2;  // 16 registers hold 6 x 2 sums, 2 columns, a broadcast and a mask
#elif defined(__ARM_NEON) && defined(__aarch64__)
constexpr const char* VECTORS = "neon";
constexpr long LANES = 4, ACROSS = 4;  // 32 registers, as AVX-512
#else
constexpr const char* VECTORS = "plain";  // right, but slow, and without an fma
constexpr long LANES = 4, ACROSS = 4;
#endif
constexpr long ROWS = 6;                  // rows of one kernel call
constexpr long STRIP = LANES * ACROSS;    // columns of one kernel call, which lie together in packed matrices
constexpr long PANEL = 64;                // what columns are padded to, and keys of a block
constexpr long GRAIN = 16;                // what rows are padded to
constexpr long PARTS = GRAIN / LANES;

typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef std::int32_t IntVec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef std::uint16_t HalfVec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

struct bf16 {
    std::uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    std::uint32_t bits = std::uint32_t(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}
template <class T>
inline T narrow(float x);
template <>
inline float narrow<float>(float x) { return x; }
template <>
inline bf16 narrow<bf16>(float x) {  // round to nearest even; a NaN stays a NaN
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {std::uint16_t((bits >> 16) | 0x40)};
    return {std::uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
inline Vec broadcast(float x) { return x - Vec{}; }

inline void narrow_store(float* p, Vec v) { store(p, v); }
inline void narrow_store(bf16* p, Vec v) {
#if defined(__AVX512BF16__)
    __m256bh half = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(p, &half, 32);
#else
    const IntVec bits = (IntVec)v, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const IntVec half = (bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded;
    *reinterpret_cast<HalfVec*>(p) = __builtin_convertvector(half, HalfVec);
#endif
}

inline Vec widen_load(const float* p) { return load(p); }
inline Vec widen_load(const bf16* p) {
    return (Vec)(__builtin_convertvector(*reinterpret_cast<const HalfVec*>(p), IntVec) << 16);
}

inline Vec fma(Vec a, Vec b, Vec c) {  // a * b + c
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

inline Vec clamp(Vec x, float low, float high) {
#if defined(__AVX512F__)
    return (Vec)_mm512_min_ps(_mm512_max_ps((__m512)x, _mm512_set1_ps(low)), _mm512_set1_ps(high));
#elif defined(__AVX2__)
    return (Vec)_mm256_min_ps(_mm256_max_ps((__m256)x, _mm256_set1_ps(low)), _mm256_set1_ps(high));
#else
    x = x < low ? broadcast(low) : x;
    return x > high ? broadcast(high) : x;
#endif
}

// 2^x for x clamped to [-126, 126], within 2 ulp: the nearest power of two times a polynomial for the rest.
inline Vec exp2(Vec x) {
    x = clamp(x, -126.0f, 126.0f);
    const Vec shift = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
    Vec shifted = x + shift, rest = x - (shifted - shift);
    Vec y = broadcast(1.546973198e-4f);
    y = fma(y, rest, broadcast(1.340043217e-3f));
    y = fma(y, rest, broadcast(9.618025603e-3f));
    y = fma(y, rest, broadcast(5.550327214e-2f));
    y = fma(y, rest, broadcast(2.402265121e-1f));
    y = fma(y, rest, broadcast(6.931472067e-1f));
    y = fma(y, rest, broadcast(1.0f));
    IntVec power = ((IntVec)shifted + (127 - 0x4b400000)) << 23;
    return y * (Vec)power;
}

inline Vec reciprocal(Vec x) { return 1.0f / x; }

// The sum of a vector's lanes, always as the same tree: halves onto halves.
inline float total(Vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float a[LANES];
    store(a, v);
    for (long width = LANES / 2; width; width /= 2)
        for (long i = 0; i < width; ++i) a[i] += a[i + width];
    return a[0];
#endif
}

// The sum of sixteen floats by that tree, in the vectors' parts.
inline float total(const float* sixteen) {
    Vec parts[PARTS];
    for (long p = 0; p < PARTS; ++p) parts[p] = load(sixteen + p * LANES);
    for (long width = PARTS / 2; width; width /= 2)
        for (long p = 0; p < width; ++p) parts[p] += parts[p + width];
    return total(parts[0]);
}

// For i < n: whole sixteens by `many`, a vector at a time, what is left one by one by `one`. Which of the two computes an
// element depends on its column alone.
template <class Many, class One>
inline void each(long n, Many many, One one) {
    long i = 0;
    for (; i + GRAIN <= n; i += GRAIN)
        for (long p = 0; p < PARTS; ++p) many(i + p * LANES);
    for (; i < n; ++i) one(i);
}

// The sum over i < n in sixteen running sums: `many` adds a vector's terms to a part of them, `one` gives a term.
template <class Many, class One>
inline float sum(long n, Many many, One one) {
    alignas(64) float sums[GRAIN];
    Vec parts[PARTS] = {};
    long i = 0;
    for (; i + GRAIN <= n; i += GRAIN)
        for (long p = 0; p < PARTS; ++p) parts[p] = many(i + p * LANES, parts[p]);
    for (long p = 0; p < PARTS; ++p) store(sums + p * LANES, parts[p]);
    for (; i < n; ++i) sums[i % GRAIN] += one(i);
    return total(sums);
}

template <class T>
inline float dot(const T* a, const T* b, long n) {
    return sum(
        n, [&](long i, Vec so_far) { return fma(widen_load(a + i), widen_load(b + i), so_far); },
        [&](long i) { return widen(a[i]) * widen(b[i]); });
}

// One step of the matrix kernel takes one fp32 or a pair of bf16 along the depth. Without an instruction for such pairs, their
// halves are widened and multiplied one after the other.
template <class T>
struct Step;
template <>
struct Step<float> {
    static constexpr int DEPTH = 1, HALVES = 1;
    static Vec row(const float* a, int) { return broadcast(*a); }
    static Vec columns(const float* b, int) { return load(b); }
    static Vec add(Vec c, Vec a, Vec b) { return fma(a, b, c); }
};
template <>
struct Step<bf16> {
    static constexpr int DEPTH = 2;
    static Vec row(const bf16* a, int half) {
        std::int32_t pair;
        std::memcpy(&pair, a, 4);
        return part(pair - IntVec{}, half);
    }
    static Vec columns(const bf16* b, int half) { return part(*reinterpret_cast<const IntVec*>(b), half); }
#if defined(__AVX512BF16__)
    static constexpr int HALVES = 1;
    static Vec part(IntVec pairs, int) { return (Vec)pairs; }
    static Vec add(Vec c, Vec a, Vec b) { return (Vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b); }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    static constexpr int HALVES = 1;
    static Vec part(IntVec pairs, int) { return (Vec)pairs; }
    static Vec add(Vec c, Vec a, Vec b) { return (Vec)vbfdotq_f32((float32x4_t)c, (bfloat16x8_t)a, (bfloat16x8_t)b); }
#else
    static constexpr int HALVES = 2;
    static Vec part(IntVec pairs, int half) { return (Vec)(half ? pairs & -65536 : pairs << 16); }
    static Vec add(Vec c, Vec a, Vec b) { return fma(a, b, c); }
#endif
};

// c[M, V vectors] (+)= a[M, depth] * b, where b lies packed: for each step along the depth, V vectors of columns.
template <class T, int M, int V, bool ADD>
inline void block(const T* a, long a_stride, const T* b, long depth, float* c, long c_stride) {
    Vec sums[M][V];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < V; ++j) sums[i][j] = ADD ? load(c + i * c_stride + j * LANES) : Vec{};
    constexpr long STEP = Step<T>::DEPTH;
    for (long k = 0; k < depth; k += STEP, b += STEP * LANES * V) {
#pragma GCC unroll 2
        for (int half = 0; half < Step<T>::HALVES; ++half) {
            Vec columns[V];
#pragma GCC unroll 8
            for (int j = 0; j < V; ++j) columns[j] = Step<T>::columns(b + STEP * LANES * j, half);
#pragma GCC unroll 8
            for (int i = 0; i < M; ++i) {
                const Vec row = Step<T>::row(a + i * a_stride + k, half);
#pragma GCC unroll 8
                for (int j = 0; j < V; ++j) sums[i][j] = Step<T>::add(sums[i][j], row, columns[j]);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < V; ++j) store(c + i * c_stride + j * LANES, sums[i][j]);
}

// The same for up to M rows.
template <class T, int V, bool ADD, int M>
void few(const T* a, long a_stride, long rows, const T* b, long depth, float* c, long c_stride) {
    if (rows == M) return block<T, M, V, ADD>(a, a_stride, b, depth, c, c_stride);
    if constexpr (M > 1) few<T, V, ADD, M - 1>(a, a_stride, rows, b, depth, c, c_stride);
}

// The same for any number of rows: in sixes, then the rest. How rows are grouped changes no row's bits.
template <class T, int V, bool ADD>
void panel(const T* a, long a_stride, long rows, const T* b, long depth, float* c, long c_stride) {
    for (; rows >= ROWS; rows -= ROWS, a += ROWS * a_stride, c += ROWS * c_stride)
        block<T, ROWS, V, ADD>(a, a_stride, b, depth, c, c_stride);
    few<T, V, ADD, ROWS - 1>(a, a_stride, rows, b, depth, c, c_stride);
}

}  // namespace ranker
