// Numbers → text as orjson writes them.
#pragma once
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace codec {

using std::string_view;

// The shortest decimal that reads back as the same number. R. Giulietti, "The Schubfach way to render doubles" (2020), for floats.
class Decimal {
public:
    explicit Decimal(const uint64_t* power) : power(power) {}

    // Writes up to 32 bytes, of which those behind the returned end mean nothing.
    char* write(char* out, float value) const {
        if (!std::isfinite(value)) return put(out, "null");
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        *out = '-';
        out += bits >> 31;
        bits &= 0x7fffffff;
        if (!bits) return put(out, "0.0");
        int32_t exponent = 0;
        uint32_t decimal = shortest(bits, exponent);
        int count = 1;
        while (count < 9 && decimal >= TENS[count]) ++count;
        char digits[16] = {};
        nine(digits, decimal * TENS[9 - count]);
        uint64_t last;
        std::memcpy(&last, digits + 1, 8);
        last ^= 0x3030303030303030;  // where these end in zeros, so does the word
        int significant = last ? 9 - __builtin_clzll(last) / 8 : 1, point = count + exponent;
        if (point > 0 || point <= LEAST_FLOAT) return lay(out, digits, significant, point, LEAST_FLOAT, MOST_FLOAT);
        std::memcpy(out, "0.000000", 8);
        std::memcpy(out + 2 - point, digits, 16);
        return out + 2 - point + significant;
    }

    char* write(char* out, double value) const {
        if (!std::isfinite(value)) return put(out, "null");
        char text[32], digits[20];
        const char* stop = std::to_chars(text, text + 32, value, std::chars_format::scientific).ptr;
        const char* from = text;
        if (*from == '-') *out++ = *from++;
        if (value == 0) return put(out, "0.0");
        int count = 0;
        for (; *from != 'e'; ++from)
            if (*from != '.') digits[count++] = *from;
        int exponent = 0;
        std::from_chars(from + (from[1] == '+' ? 2 : 1), stop, exponent);
        return lay(out, digits, count, exponent + 1, LEAST_DOUBLE, MOST_DOUBLE);
    }

    static char* put(char* out, string_view text) {
        std::memcpy(out, text.data(), text.size());
        return out + text.size();
    }

private:
    // orjson's bounds between 0.000012 and 1.2e-5, and between 1200.0 and 1.2e+3, by where the point lies.
    static constexpr int LEAST_FLOAT = -6, MOST_FLOAT = 13, LEAST_DOUBLE = -5, MOST_DOUBLE = 16;
    static constexpr uint32_t TENS[] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000, 1000000000};

    const uint64_t* power;  // ⌈10^k · 2^(63 − ⌊log₂ 10^k⌋)⌉ for k = −31 … 45

    static void nine(char* out, uint32_t decimal) {
        *out++ = '0' + decimal / TENS[8];
        for (int place = 6; place >= 0; place -= 2, out += 2) {
            uint32_t pair = decimal / TENS[place] % 100;
            out[0] = '0' + pair / 10, out[1] = '0' + pair % 10;
        }
    }

    static uint32_t round_to_odd(uint64_t g, uint32_t factor) {
        auto product = static_cast<unsigned __int128>(g) * factor;
        auto high = static_cast<uint32_t>(product >> 64), low = static_cast<uint32_t>(product >> 32);
        return high | (low > 1);
    }

    // `value` = result · 10^exponent; letters as in the paper.
    uint32_t shortest(uint32_t bits, int32_t& exponent) const {
        uint32_t fraction = bits & 0x7fffff, biased = bits >> 23;
        uint32_t c = biased ? fraction | 0x800000 : fraction;
        int32_t q = (biased ? static_cast<int32_t>(biased) : 1) - 150;
        if (-q >= 0 && -q < 24 && !(c & ((1u << -q) - 1))) return exponent = 0, c >> -q;
        bool is_odd = c & 1, is_irregular = !fraction && biased > 1;
        int32_t k = (q * 1262611 - (is_irregular ? 524031 : 0)) >> 22;
        int32_t h = q + (-k * 1741647 >> 19) + 1;
        uint64_t g = power[31 - k];
        uint32_t low = round_to_odd(g, (4 * c - 2 + is_irregular) << h) + is_odd;
        uint32_t middle = round_to_odd(g, 4 * c << h), high = round_to_odd(g, (4 * c + 2) << h) - is_odd;
        uint32_t s = middle / 4;
        exponent = k;
        if (s >= 10) {
            uint32_t tens = s / 10;
            bool below = low <= 40 * tens, above = 40 * tens + 40 <= high;
            if (below != above) return ++exponent, tens + above;
        }
        bool below = low <= 4 * s, above = 4 * s + 4 <= high;
        if (below != above) return s + above;
        uint32_t half = 4 * s + 2;
        return s + (middle > half || (middle == half && s & 1));
    }

    // Digits with a point after the first `point` of them, in the form that orjson gives them.
    static char* lay(char* out, const char* digits, int count, int point, int least, int most) {
        if (point > most || point <= least) {
            *out++ = digits[0];
            if (count > 1) *out++ = '.', out = std::copy(digits + 1, digits + count, out);
            *out++ = 'e', *out++ = point > 0 ? '+' : '-';
            return std::to_chars(out, out + 4, std::abs(point - 1)).ptr;
        }
        if (point <= 0) return std::copy(digits, digits + count, std::fill_n(put(out, "0."), -point, '0'));
        if (point >= count) return put(std::fill_n(std::copy(digits, digits + count, out), point - count, '0'), ".0");
        out = std::copy(digits, digits + point, out);
        *out++ = '.';
        return std::copy(digits + point, digits + count, out);
    }
};


constexpr size_t FLOAT_BYTES = 20, DOUBLE_BYTES = 32;  // the longest of them, with a comma; `Decimal::write` needs 32 more

}  // namespace codec
