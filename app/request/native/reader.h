// The JSON of a request → columns. Any rule of body.py or validate.py that does not hold throws `Declined`.
#pragma once
#include <algorithm>
#include <charconv>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ids.h"
#include "python.h"

namespace codec {

// Mirrored in codec.py.
struct Checkpoint {
    Int actions, surfaces, history_length, age_seconds, age_buckets, continuous, has_text_ids;
    Int max_candidates, max_history, max_values, max_time;
    double max_action_value, max_dwell_seconds;
    Int names;
    const char* const* name;  // as JSON has them, without escapes
    const Int* column;        // of each name
    const char* const* key;   // of each continuous output, with quotes
    const float* scale;       // of each continuous output
};

class Posts {
public:
    std::vector<Id> post, author, surface, time;
    std::vector<string_view> written;  // post ids that are strings, as the body has them, of candidates; integers before them: empty
    std::vector<float> actions, dwell;
    size_t count = 0;

    void clear() {
        post.clear(), author.clear(), surface.clear(), time.clear(), written.clear(), actions.clear(), dwell.clear();
        count = 0;
    }
};

template <class T>
void put(std::vector<T>& column, size_t row, T value) {
    if (column.size() < row) column.resize(row);  // items before this one did not have it
    column.push_back(value);
}

// The one JSON text of a request. It ends with a zero byte, which no rule accepts.
class Reader {
public:
    Reader(
        const Checkpoint& words, const std::unordered_map<string_view, Int>& columns, Posts& history, Posts& candidates,
        const char* text, Int length
    ) : history(history), candidates(candidates), words(words), columns(columns), at(text), end(text + length) {}

    Posts &history, &candidates;
    Id user_id = 0, impression = 0;
    std::string rest;

    // With candidates it is a request to rank them, without a user's history alone; what else it says is in `rest`.
    void request(bool has_candidates) {
        history.clear(), candidates.clear();
        auto is_value = [](char c) { return c == ',' || c == '[' || c == '{' || c == '\\'; };  // as in `check_cost`
        if (end - at > words.max_values && std::count_if(at, end, is_value) > words.max_values) throw Declined();
        unsigned seen = 0;
        members([&](string_view key) {
            if (key == "user_id") once(seen, 0), user_id = id();
            else if (key == "history") once(seen, 1), posts(history, true);
            else if (key == "candidates" && has_candidates) once(seen, 2), posts(candidates, false);
            else if (key == "impression_ts" && has_candidates) once(seen, 3), impression = integer(words.max_time);
            else if (key == "context") once(seen, 4), keep(key);
            else keep(key);  // who reads `rest` refuses what it does not know, and what comes twice
        });
        if (next() || at != end) throw Declined();
        if ((seen >> 4 & 1 ? seen & 3 : !(seen & 1)) || (has_candidates && !candidates.count)) throw Declined();
        if (!rest.empty()) rest += '}';
    }

private:
    const Checkpoint& words;
    const std::unordered_map<string_view, Int>& columns;
    const char* at;
    const char* end;

    char next() {
        while (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t') ++at;
        return *at;
    }

    void expect(char wanted) {
        if (next() != wanted) throw Declined();
        ++at;
    }

    bool take(char wanted) {
        if (next() != wanted) return false;
        ++at;
        return true;
    }

    static void once(unsigned& seen, int place) {
        if (seen >> place & 1) throw Declined();
        seen |= 1u << place;
    }

    template <class Each>
    void members(Each each) {
        expect('{');
        if (take('}')) return;
        do {
            string_view key = text();
            expect(':');
            each(key);
        } while (take(','));
        expect('}');
    }

    template <class Each>
    void elements(Each each) {
        expect('[');
        if (take(']')) return;
        do each();
        while (take(','));
        expect(']');
    }

    // Of eight bytes: the lowest bit that is set lies in the first one that ends a text, escapes or may not be in one.
    static Id unusual(const char* at) {
        constexpr Id ONES = ~Id{} / 255, HIGHEST = 128 * ONES;
        Id bytes;
        std::memcpy(&bytes, at, 8);
        const auto zeros = [](Id word) { return (word - ONES) & ~word; };
        return (zeros(bytes ^ '"' * ONES) | zeros(bytes ^ '\\' * ONES) | ((bytes - ' ' * ONES) & ~bytes)) & HIGHEST;
    }

    string_view text() {
        expect('"');
        const char* start = at;
        for (; end - at >= 8; at += 8) {
            if (const Id ends = unusual(at)) {
                at += __builtin_ctzll(ends) / 8;
                break;
            }
        }
        while (*at != '"') {
            if (static_cast<unsigned char>(*at) < 0x20 || *at == '\\') throw Declined();
            ++at;
        }
        return {start, static_cast<size_t>(at++ - start)};
    }

    Id digits() {
        const char* start = at;
        Id value = 0;
        for (; *at >= '0' && *at <= '9'; ++at) {
            unsigned digit = *at - '0';
            if (at - start >= 19 && (at - start > 19 || value > (UINT64_MAX - digit) / 10)) throw Declined();
            value = 10 * value + digit;
        }
        if (at == start || (*start == '0' && at - start > 1)) throw Declined();
        return value;
    }

    Id integer(Id most) {
        next();
        Id value = digits();
        if (value > most || *at == '.' || *at == 'e' || *at == 'E') throw Declined();
        return value;
    }

    Id id() {
        if (words.has_text_ids) {
            string_view id = text();
            if (id.empty() || id.size() > MAX_TEXT_BYTES || !is_utf8(id)) throw Declined();
            return std::max<Id>(xxh64(id), 1);
        }
        if (next() != '"') return integer(UINT64_MAX);
        ++at;
        Id value = digits();
        if (*at++ != '"') throw Declined();
        return value;
    }

    // A number ≥ 0 of moderate length, as the double nearest to it.
    double number() {
        next();
        const char* start = at;
        Id whole = digits();
        if (*at != '.' && *at != 'e' && *at != 'E') {
            if (whole >> 53) throw Declined();
            return static_cast<double>(whole);
        }
        if (*at == '.') some_digits(++at);
        if (*at == 'e' || *at == 'E') {
            ++at;
            if (*at == '+' || *at == '-') ++at;
            some_digits(at);
        }
        double value = 0;
        auto [stop, fault] = std::from_chars(start, at, value);
        if (fault != std::errc() || stop != at || at - start > 64) throw Declined();
        return value;
    }

    static void some_digits(const char*& at) {
        const char* start = at;
        while (*at >= '0' && *at <= '9') ++at;
        if (at == start) throw Declined();
    }

    void posts(Posts& posts, bool of_history) {
        if (next() == '[') items(posts, of_history);
        else arrays(posts, of_history);
        for (auto column : {&posts.surface, &posts.time}) column->resize(posts.count);
        posts.dwell.resize(posts.count);
        posts.actions.resize(posts.count * words.actions * of_history);
    }

    void items(Posts& posts, bool of_history) {
        elements([&] {
            unsigned seen = 0;
            members([&](string_view key) { value(posts, once_of(seen, key, of_history), posts.count); });
            if ((seen & 3) != 3) throw Declined();
            ++posts.count;
        });
    }

    void arrays(Posts& posts, bool of_history) {
        unsigned seen = 0;
        members([&](string_view key) {
            int field = once_of(seen, key, of_history);
            bool is_first = !(seen & (seen - 1));
            size_t row = 0;
            elements([&] { value(posts, field, row++); });
            if (!is_first && row != posts.count) throw Declined();
            posts.count = row;
        });
        if ((seen & 3) != 3) throw Declined();
    }

    static int once_of(unsigned& seen, string_view key, bool of_history) {
        int field = key == "post_id" ? 0 : key == "author_id" ? 1 : key == "product_surface" ? 2
            : key == "created_at" && !of_history ? 3
            : key == "actions" && of_history ? 4 : key == "dwell_time" && of_history ? 5 : -1;
        if (field < 0) throw Declined();
        once(seen, field);
        return field;
    }

    void value(Posts& posts, int field, size_t row) {
        if (row >= static_cast<size_t>(&posts == &history ? words.max_history : words.max_candidates)) throw Declined();
        switch (field) {
            case 0: {
                const bool is_string = next() == '"' && &posts == &candidates;
                const char* start = at;
                put(posts.post, row, id());
                if (is_string) put(posts.written, row, string_view(start, at - start));
                break;
            }
            case 1: put(posts.author, row, id()); break;
            case 2: put(posts.surface, row, integer(words.surfaces - 1)); break;
            case 3: put(posts.time, row, integer(words.max_time)); break;
            case 4: actions(posts, row); break;
            case 5: put(posts.dwell, row, static_cast<float>(std::min(number(), words.max_dwell_seconds))); break;
        }
    }

    void actions(Posts& posts, size_t row) {
        posts.actions.resize((row + 1) * words.actions);
        float* set = &posts.actions[row * words.actions];
        const char first = next();
        if (first == '[') return elements([&] { set[column(text())] = 1; });
        if (first != '{') {
            for (Id mask = integer(words.actions < 64 ? (Id{1} << words.actions) - 1 : UINT64_MAX); mask; mask &= mask - 1)
                set[__builtin_ctzll(mask)] = 1;
            return;
        }
        uint64_t seen[64] = {};  // a bit an action, of which a config has 4096 at most
        members([&](string_view key) {
            Int place = column(key);
            if (seen[place / 64] >> place % 64 & 1) throw Declined();
            seen[place / 64] |= uint64_t{1} << place % 64;
            double value = number();
            if (value > words.max_action_value) throw Declined();
            set[place] = static_cast<float>(value);
        });
    }

    Int column(string_view name) const {
        auto found = columns.find(name);
        if (found == columns.end()) throw Declined();
        return found->second;
    }

    // Copies a member that is rare; whether its value is JSON is found out by who reads the copy.
    void keep(string_view key) {
        next();
        const char* start = at;
        Int depth = 0;
        do {
            if (*at == '"') {
                do {
                    at += *at == '\\' ? 2 : 1;
                    if (at >= end) throw Declined();
                } while (*at != '"');
                ++at;
            } else {
                if (*at == '{' || *at == '[') ++depth;
                if (*at == '}' || *at == ']') --depth;
                ++at;
            }
            if (at >= end || depth < 0) throw Declined();
        } while (depth || (*at != ',' && *at != '}'));
        rest += rest.empty() ? "{\"" : ",\"";
        rest.append(key).append("\":").append(start, at - start);
    }
};


}  // namespace codec
