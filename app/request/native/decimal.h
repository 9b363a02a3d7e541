// Numbers → text as orjson writes them: the shortest digits that read back as the same number.
#pragma once
#include <algorithm>
#include <charconv>
#include <cmath>
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

inline char* put(char* out, string_view text) {
    std::memcpy(out, text.data(), text.size());
    return out + text.size();
}

template <class T>
char* write(char* out, T value) {
    if (!std::isfinite(value)) return put(out, "null");
    *out = '-';
    out += std::signbit(value);
    if (value == 0) return put(out, "0.0");
    char text[48], digits[32];  // d.ddde±xx
    char* stop = std::to_chars(text, text + 32, std::abs(value), std::chars_format::scientific).ptr;
    char* exponent = stop - 4 - (stop[-4] != 'e');
    int count = std::max<int>(exponent - text - 1, 1), power = 0;
    for (char* at = exponent + 2; at != stop; ++at) power = 10 * power + *at - '0';
    int point = 1 + (exponent[1] == '-' ? -power : power);
    digits[0] = text[0];
    std::memcpy(digits + 1, text + 2, 20);
    if (point < LEAST_POINT<T> || point > MOST_POINT<T>) {
        *out++ = digits[0];
        if (count > 1) *out++ = '.', out = put(out, {digits + 1, static_cast<size_t>(count - 1)});
        *out++ = 'e', *out++ = exponent[1];
        return std::to_chars(out, out + 4, power).ptr;
    }
    if (point <= 0) {  // as most probabilities are: copies of a fixed length need no loop
        std::memcpy(out, "0.000000", 8);
        std::memcpy(out + 2 - point, digits, 24);
        return out + 2 - point + count;
    }
    if (point >= count) return put(std::fill_n(put(out, {digits, static_cast<size_t>(count)}), point - count, '0'), ".0");
    out = put(out, {digits, static_cast<size_t>(point)});
    *out++ = '.';
    return put(out, {digits + point, static_cast<size_t>(count - point)});
}

}  // namespace codec
