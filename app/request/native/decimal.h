// Numbers → text as orjson writes them: the shortest digits that read back as the same number. For little-endian processors.
#pragma once
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace codec {

using std::string_view;

constexpr size_t FLOAT_BYTES = 20, DOUBLE_BYTES = 32;  // the longest of them, with a comma
constexpr size_t SPARE_BYTES = 32;                     // that `write` may touch behind what it returns

// Where the point lies in the smallest and largest numbers that orjson writes without an exponent.
template <class T>
constexpr int LEAST_POINT = sizeof(T) == 4 ? -5 : -4;
template <class T>
constexpr int MOST_POINT = sizeof(T) == 4 ? 13 : 16;

// How many floats are converted at a time: as many 64-bit words as the processor's vectors have.
#if defined(__AVX512F__)
constexpr size_t LANES = 8;
#elif defined(__AVX2__)
constexpr size_t LANES = 4;
#else
constexpr size_t LANES = 2;
#endif
template <class T>
using Vector __attribute__((vector_size(8 * LANES))) = T;
using Lanes = Vector<int64_t>;

constexpr int64_t TWICE = 1 + (1LL << 32);
template <int64_t number>
constexpr int64_t KEPT = number;

// A constant in every lane. GCC has each go through a general register whenever it is used, which takes as long as all else here.
template <int64_t number>
__attribute__((always_inline)) inline Lanes every() {
#if defined(__AVX512F__) && !defined(__clang__)
    Lanes found;
    asm("vpbroadcastq %1, %0" : "=v"(found) : "m"(KEPT<number>));
    return found;
#else
    return Lanes{} + number;
#endif
}

// Of the lower 32 bits of each lane, without sign: processors are quicker at that than at products of 64 bits, if they have them.
inline Lanes product(Lanes left, Lanes right) {
#if defined(__AVX512F__)
    return Lanes(_mm512_mul_epu32(__m512i(left), __m512i(right)));
#elif defined(__AVX2__)
    return Lanes(_mm256_mul_epu32(__m256i(left), __m256i(right)));
#else
    return (left & 0xffffffff) * (right & 0xffffffff);
#endif
}

// Floats as 0.ddd · 10^point: the first of nine digits, which is not 0, and the others as bytes 0 … 9.
struct Decimals {
    Lanes first, rest, point;
};

// 10^power = POWERS[power - LEAST_POWER] · 2^n, rounded up, with n such that the 64 bits are full.
constexpr int LEAST_POWER = -31, POWER_COUNT = 77;

constexpr uint64_t power_of_ten(int power) {
    unsigned __int128 five = 1;
    for (int i = power < 0 ? -power : power; i > 0; --i) five *= 5;
    int bits = 128;
    while (!(five >> (bits - 1))) --bits;
    if (power >= 0 && bits <= 64) return static_cast<uint64_t>(five) << (64 - bits);
    if (power >= 0) return static_cast<uint64_t>(five >> (bits - 64)) + 1;  // odd, so a remainder is left
    uint64_t quotient = 0;
    unsigned __int128 rest = 1;
    for (int i = 0; i < bits + 63; ++i) {  // 2^(bits + 63) / 5^-power
        rest *= 2, quotient *= 2;
        if (rest >= five) rest -= five, ++quotient;
    }
    return quotient + 1;
}

constexpr auto POWERS = [] {
    std::array<uint64_t, POWER_COUNT> table{};
    for (int i = 0; i < POWER_COUNT; ++i) table[i] = power_of_ten(i + LEAST_POWER);
    return table;
}();

// Schubfach (R. Giulietti, 2020): of the decimals that round to a float, the nearest of those with the fewest digits. The same steps
// for every lane: a branch would be guessed wrong half of the time. What holds is -1, as vectors have it.
__attribute__((always_inline)) inline Decimals shortest(const float* values) {
    Lanes bits;
    for (size_t i = 0; i < LANES; ++i) {
        int32_t word;
        std::memcpy(&word, values + i, 4);
        bits[i] = word;
    }
    const Lanes one = every<1>(), two = every<2>(), four = every<4>(), ten = every<10>(), hundred_million = every<100'000'000>();
    const Lanes fraction = bits & every<0x7fffff>(), exponent = bits >> 23 & every<0xff>(), is_normal = exponent > 0;
    const Lanes is_power = (fraction == 0) & (exponent > one);  // whose lower neighbour is nearer
    const Lanes c = fraction | (is_normal & every<0x800000>()), q = exponent + is_normal - every<149>();  // the float is c · 2^q
    const Lanes k = (q * every<1262611>() + (is_power & every<-524031>())) >> 22;  // ⌊log10 of the interval's width⌋
    const Lanes shift = q + ((-k * every<1741647>()) >> 19) + one;
    Lanes g;
    for (size_t i = 0; i < LANES; ++i) g[i] = POWERS[-k[i] - LEAST_POWER];
    auto scaled = [&](Lanes times_four) {  // by 10^-k; the last bit says whether anything was cut off
        const Lanes by = times_four << shift, found = product(g >> 32, by) + (product(g, by) >> 32 & every<0xffffffff>());
        return found >> 32 | (((found & every<0xffffffff>()) > one) & one);
    };
    const Lanes is_odd = c & one, c4 = c << 2;  // if odd, the ends of the interval round to its neighbours
    const Lanes low = scaled(c4 - two - is_power) + is_odd, middle = scaled(c4), high = scaled(c4 + two) - is_odd;
    const Lanes fine = middle >> 2, fine4 = fine << 2, coarse = product(fine, every<3435973837>()) >> 35;  // fine / 10
    const Lanes coarse4 = product(coarse, every<40>()), coarse_up = coarse4 + every<40>() <= high, coarse_down = low <= coarse4;
    const Lanes fine_up = fine4 + four <= high, fine_down = low <= fine4;
    const Lanes is_nearer_up = (middle & every<3>()) + (fine & one) > two, is_coarse = (coarse_up ^ coarse_down) & (fine >= ten);
    Lanes digits = is_coarse ? coarse - coarse_up : fine - (fine_up ^ fine_down ? fine_up : is_nearer_up), length = every<9>();
    auto lengthen = [&](Lanes limit, Lanes factor, Lanes by) {
        const Lanes is_short = digits < limit;
        digits = is_short ? product(digits, factor) : digits;
        length -= is_short & by;
    };
    lengthen(every<100'000>(), every<10'000>(), four), lengthen(every<10'000'000>(), every<100>(), two);
    lengthen(hundred_million, ten, one), lengthen(hundred_million, ten, one);
    const Lanes first = product(digits, every<1441151881>()) >> 57, rest = digits - product(first, hundred_million);
    const Lanes half = product(rest, every<3518437209>()) >> 45;                        // rest / 10^4
    const Lanes halves = half | (rest - product(half, every<10'000>())) << 32;          // then four pairs, then eight digits
    const Lanes hundreds = Lanes(Vector<uint32_t>(halves) * Vector<uint32_t>(every<10486 * TWICE>()) >> 20);
    const Lanes pairs = hundreds | (halves - Lanes(Vector<uint32_t>(hundreds) * Vector<uint32_t>(every<100 * TWICE>()))) << 16;
    const Lanes tens = Lanes(Vector<uint16_t>(pairs) * Vector<uint16_t>(every<103 * TWICE * 0x10001>()) >> 10);
    const Lanes ones = pairs - Lanes(Vector<uint16_t>(tens) * Vector<uint16_t>(every<10 * TWICE * 0x10001>()));
    return {first, tens | ones << 8, length + k - is_coarse};
}

inline char* put(char* out, string_view text) {
    std::memcpy(out, text.data(), text.size());
    return out + text.size();
}

template <class T>
char* lay_out(char* out, const char* digits, int count, int point) {
    if (point < LEAST_POINT<T> || point > MOST_POINT<T>) {
        *out++ = digits[0];
        if (count > 1) *out++ = '.', out = put(out, {digits + 1, static_cast<size_t>(count - 1)});
        out = put(out, point > 0 ? "e+" : "e");
        return std::to_chars(out, out + 8, point - 1).ptr;
    }
    if (point <= 0) {
        std::memcpy(out, "0.000000", 8);
        std::memcpy(out + 2 - point, digits, 20);
        return out + 2 - point + count;
    }
    if (point >= count) return put(std::fill_n(put(out, {digits, static_cast<size_t>(count)}), point - count, '0'), ".0");
    out = put(out, {digits, static_cast<size_t>(point)});
    *out++ = '.';
    return put(out, {digits + point, static_cast<size_t>(count - point)});
}

template <class T, class Positive>
char* write_sign(char* out, T value, Positive positive) {
    if (!std::isfinite(value)) return put(out, "null");
    *out = '-';
    out += std::signbit(value);
    return value == 0 ? put(out, "0.0") : positive(out);
}

// The float that `found` has in this lane.
inline char* write(char* out, float value, const Decimals& found, size_t lane) {
    return write_sign(out, value, [&](char* out) {
        const int64_t point = found.point[lane], others = found.rest[lane], last = others ? 8 - __builtin_clzll(others) / 8 : 0;
        const uint64_t rest = others | 0x30303030'30303030;
        char digits[20] = {static_cast<char>('0' + found.first[lane])};
        if (point <= 0 && point >= LEAST_POINT<float>) {  // as most probabilities have it
            std::memcpy(out, "0.000000", 8);
            out += 2 - point;
            *out = digits[0];
            std::memcpy(out + 1, &rest, 8);
            return out + 1 + last;
        }
        std::memcpy(digits + 1, &rest, 8);
        return lay_out<float>(out, digits, 1 + last, point);
    });
}

inline char* write(char* out, double value) {
    return write_sign(out, value, [&](char* out) {
        char text[40], digits[20];  // d.ddde±xx
        char* stop = std::to_chars(text, text + 32, std::abs(value), std::chars_format::scientific).ptr;
        char* exponent = stop - 4 - (stop[-4] != 'e');
        int power = 0;
        for (char* at = exponent + 2; at != stop; ++at) power = 10 * power + *at - '0';
        digits[0] = text[0];
        std::memcpy(digits + 1, text + 2, 19);
        const int point = 1 + (exponent[1] == '-' ? -power : power);
        return lay_out<double>(out, digits, std::max<int>(exponent - text - 1, 1), point);
    });
}

}  // namespace codec
