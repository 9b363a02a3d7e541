// Sixteen floats at a time, and the matrix kernel that everything is made of. Nothing here knows the model.
//
// Isolation rests on one rule: the number a row gets is a fixed sequence of operations on that row alone. No
// reduction is ever split or reordered by how many rows, keys or threads there are. Compiled with -ffp-contract=off,
// so that nothing becomes an fma but what is written as one here.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace ranker {

constexpr long LANES = 16;
constexpr long PANEL = 64;  // columns of a packed panel, and keys of a block
constexpr long ROWS = 6;    // rows of one kernel call: 6 x 4 accumulators, 4 columns and a broadcast fill 32 registers

typedef float Vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef std::int32_t IntVec __attribute__((vector_size(64), aligned(4), may_alias));

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
    for (long i = 0; i < LANES; ++i) p[i] = narrow<bf16>(v[i]);
#endif
}

inline Vec widen_load(const float* p) { return load(p); }
inline Vec widen_load(const bf16* p) {
#if defined(__AVX512F__)
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#else
    Vec wide;
    for (long i = 0; i < LANES; ++i) wide[i] = widen(p[i]);
    return wide;
#endif
}

inline Vec fma(Vec a, Vec b, Vec c) {  // a * b + c
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

inline Vec clamp(Vec x, float low, float high) {
#if defined(__AVX512F__)
    return (Vec)_mm512_min_ps(_mm512_max_ps((__m512)x, _mm512_set1_ps(low)), _mm512_set1_ps(high));
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

// The sum of sixteen lanes, always as the same tree: halves onto halves.
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

// out[i] = f(i) for i < n: sixteen at a time by `many`, what is left one by one by `one`. Which of the two computes an
// element depends on its column alone.
template <class Many, class One>
inline void each(long n, Many many, One one) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) many(i);
    for (; i < n; ++i) one(i);
}

template <class T>
inline float dot(const T* a, const T* b, long n) {
    Vec products = {};
    each(
        n, [&](long i) { products = fma(widen_load(a + i), widen_load(b + i), products); },
        [&](long i) { products[i % LANES] += widen(a[i]) * widen(b[i]); });
    return total(products);
}

// One step of the matrix kernel takes one fp32 or a pair of bf16 along the depth.
template <class T>
struct Step;
template <>
struct Step<float> {
    static constexpr long DEPTH = 1;
    static Vec row(const float* a) { return broadcast(*a); }
    static Vec add(Vec c, Vec a, const float* b) { return fma(a, load(b), c); }
};
template <>
struct Step<bf16> {
    static constexpr long DEPTH = 2;
    static Vec row(const bf16* a) {
        std::int32_t pair;
        std::memcpy(&pair, a, 4);
        return (Vec)(pair - IntVec{});
    }
    static Vec add(Vec c, Vec a, const bf16* b) {
#if defined(__AVX512BF16__)
        return (Vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)load(reinterpret_cast<const float*>(b)));
#else
        const IntVec pairs = *reinterpret_cast<const IntVec*>(b), row = (IntVec)a;
        c = fma((Vec)(row << 16), (Vec)(pairs << 16), c);
        return fma((Vec)(row & -65536), (Vec)(pairs & -65536), c);
#endif
    }
};

// c[M, 16 V] (+)= a[M, depth] * b, where b lies packed: for each step along the depth, 16 V columns.
template <class T, int M, int V, bool ADD>
inline void block(const T* a, long a_stride, const T* b, long depth, float* c, long c_stride) {
    Vec sums[M][V];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < V; ++j) sums[i][j] = ADD ? load(c + i * c_stride + j * LANES) : Vec{};
    constexpr long STEP = Step<T>::DEPTH;
    for (long k = 0; k < depth; k += STEP, b += STEP * LANES * V) {
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) {
            const Vec row = Step<T>::row(a + i * a_stride + k);
#pragma GCC unroll 8
            for (int j = 0; j < V; ++j) sums[i][j] = Step<T>::add(sums[i][j], row, b + STEP * LANES * j);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < V; ++j) store(c + i * c_stride + j * LANES, sums[i][j]);
}

// The same for any number of rows: in sixes, then the rest. How rows are grouped changes no row's bits.
template <class T, int V, bool ADD>
void panel(const T* a, long a_stride, long rows, const T* b, long depth, float* c, long c_stride) {
    for (; rows >= ROWS; rows -= ROWS, a += ROWS * a_stride, c += ROWS * c_stride)
        block<T, ROWS, V, ADD>(a, a_stride, b, depth, c, c_stride);
    switch (rows) {
        case 5: return block<T, 5, V, ADD>(a, a_stride, b, depth, c, c_stride);
        case 4: return block<T, 4, V, ADD>(a, a_stride, b, depth, c, c_stride);
        case 3: return block<T, 3, V, ADD>(a, a_stride, b, depth, c, c_stride);
        case 2: return block<T, 2, V, ADD>(a, a_stride, b, depth, c, c_stride);
        case 1: return block<T, 1, V, ADD>(a, a_stride, b, depth, c, c_stride);
    }
}

}  // namespace ranker
