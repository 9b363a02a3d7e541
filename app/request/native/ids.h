// Ids that are texts: whether bytes are one, and the number that a model reads of it, as weights/text_ids.py has it.
#pragma once
#include <cstdint>
#include <cstring>
#include <string_view>

namespace codec {

using Id = uint64_t;
using std::string_view;

constexpr size_t MAX_TEXT_BYTES = 128;  // as in weights/text_ids.py

// Whether this is UTF-8 as RFC 3629 has it: shortest forms, no surrogates, nothing beyond U+10FFFF.
inline bool is_utf8(string_view text) {
    const auto byte = [&](size_t place) { return static_cast<unsigned char>(text[place]); };
    for (size_t place = 0; place < text.size();) {
        for (uint64_t bytes; text.size() - place >= 8; place += 8) {
            std::memcpy(&bytes, &text[place], 8);
            if (bytes & 0x8080808080808080) break;
        }
        if (place == text.size()) break;
        const unsigned char lead = byte(place++);
        if (lead < 0x80) continue;
        const size_t further = lead < 0xc2 ? 0 : lead < 0xe0 ? 1 : lead < 0xf0 ? 2 : lead < 0xf5 ? 3 : 0;
        if (!further || further > text.size() - place) return false;
        const unsigned char least = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80, most = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
        if (byte(place) < least || byte(place) > most) return false;
        for (size_t next = 1; next < further; ++next)
            if (byte(place + next) >> 6 != 2) return false;
        place += further;
    }
    return true;
}

// XXH64 (Y. Collet) with seed 0. For little-endian processors.
inline Id xxh64(string_view text) {
    constexpr Id P1 = 0x9E3779B185EBCA87, P2 = 0xC2B2AE3D27D4EB4F, P3 = 0x165667B19E3779F9, P4 = 0x85EBCA77C2B2AE63, P5 = 0x27D4EB2F165667C5;
    const auto turned = [](Id word, int by) { return word << by | word >> (64 - by); };
    const auto round = [&](Id sum, Id word) { return turned(sum + word * P2, 31) * P1; };
    const char *at = text.data(), *end = at + text.size();
    const auto take = [&](auto word) {
        std::memcpy(&word, at, sizeof word);
        at += sizeof word;
        return word;
    };
    Id hash = P5;
    if (text.size() >= 32) {
        Id sums[4] = {P1 + P2, P2, 0, Id{} - P1};
        while (end - at >= 32)
            for (Id& sum : sums) sum = round(sum, take(Id{}));
        hash = turned(sums[0], 1) + turned(sums[1], 7) + turned(sums[2], 12) + turned(sums[3], 18);
        for (Id sum : sums) hash = (hash ^ round(0, sum)) * P1 + P4;
    }
    hash += text.size();
    while (end - at >= 8) hash = turned(hash ^ round(0, take(Id{})), 27) * P1 + P4;
    if (end - at >= 4) hash = turned(hash ^ take(uint32_t{}) * P1, 23) * P2 + P3;
    while (at < end) hash = turned(hash ^ take(uint8_t{}) * P5, 11) * P1;
    hash = (hash ^ hash >> 33) * P2;
    hash = (hash ^ hash >> 29) * P3;
    return hash ^ hash >> 32;
}

}  // namespace codec
