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
using Words = uint64_t __attribute__((vector_size(8 * LANES)));
using Signed = int64_t __attribute__((vector_size(8 * LANES)));

// Floats as 0.ddd · 10^point: the first of nine digits, which is not 0, and the others as bytes 0 … 9.
struct Decimals {
    Words first, rest;
    Signed point;
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
inline Decimals shortest(const float* values) {
    Signed bits;
    for (size_t i = 0; i < LANES; ++i) {
        int32_t word;
        std::memcpy(&word, values + i, 4);
        bits[i] = word;
    }
    const Signed fraction = bits & 0x7fffff, exponent = bits >> 23 & 0xff, is_normal = exponent > 0;
    const Signed is_power = (fraction == 0) & (exponent > 1);                             // whose lower neighbour is nearer
    const Signed c = fraction | (is_normal & 0x800000), q = exponent + is_normal - 149;  // the float is c · 2^q
    const Signed k = (q * 1262611 + (is_power & -524031)) >> 22;                         // ⌊log10 of the interval's width⌋
    const Words shift = Words(q + ((-k * 1741647) >> 19) + 1);
    Words g;
    for (size_t i = 0; i < LANES; ++i) g[i] = POWERS[-k[i] - LEAST_POWER];
    auto scaled = [&](Signed times_four) {  // by 10^-k; the last bit says whether anything was cut off
        const Words by = Words(times_four) << shift, product = (g >> 32) * by + ((g & 0xffffffff) * by >> 32);
        return Signed(product >> 32) | (((product & 0xffffffff) > 1) & 1);
    };
    const Signed is_odd = c & 1;  // then the ends of the interval round to its neighbours
    const Signed low = scaled(4 * c - 2 - is_power) + is_odd, middle = scaled(4 * c), high = scaled(4 * c + 2) - is_odd;
    const Signed fine = middle >> 2, coarse = Signed(Words(fine) * 3435973837 >> 35);  // fine / 10
    const Signed coarse_up = 40 * coarse + 40 <= high, coarse_down = low <= 40 * coarse;
    const Signed fine_up = 4 * fine + 4 <= high, fine_down = low <= 4 * fine, is_nearer_up = (middle & 3) + (fine & 1) > 2;
    const Signed is_coarse = (coarse_up ^ coarse_down) & (fine >= 10);
    Signed digits = is_coarse ? coarse - coarse_up : fine - (fine_up ^ fine_down ? fine_up : is_nearer_up), length = c - c + 9;
    auto lengthen = [&](int64_t limit, int64_t factor, int64_t by) {
        const Signed is_short = digits < limit;
        digits = is_short ? digits * factor : digits;
        length -= is_short & by;
    };
    lengthen(100'000, 10'000, 4), lengthen(10'000'000, 100, 2), lengthen(100'000'000, 10, 1), lengthen(100'000'000, 10, 1);
    const Words nine = Words(digits), first = nine * 1441151881 >> 57, rest = nine - first * 100'000'000;  // nine / 10^8
    const Words half = rest * 3518437209 >> 45;                                                            // rest / 10^4
    Words text = half | (rest - half * 10'000) << 32;  // two halves, four pairs, eight digits
    Words upper = (text * 10486 >> 20) & 0x0000007f'0000007f;
    text = upper | (text - 100 * upper) << 16;
    upper = (text * 103 >> 10) & 0x000f000f'000f000f;
    return {first, upper | (text - 10 * upper) << 8, length + k - is_coarse};
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
        const int64_t point = found.point[lane], last = found.rest[lane] ? 8 - __builtin_clzll(found.rest[lane]) / 8 : 0;
        const uint64_t rest = found.rest[lane] | 0x30303030'30303030;
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
