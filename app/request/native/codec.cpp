// Requests in JSON → columns, scores → JSON, for requests as most callers write them. What is unusual is declined, and Python
// reads it: body.py, validate.py, features.py and reply.py say what all of this means, and tests compare the two.
#include <memory>

#include "decimal.h"
#include "ranking.h"
#include "reader.h"

namespace codec {
namespace {

constexpr Int MOST_CANDIDATES = 1 << 24;

// What the columns begin with; mirrored in codec.py.
struct Head {
    Id user_id;
    Int events, kept, candidates, echo, rest;
};

class Codec : public Ranking {
public:
    explicit Codec(const Checkpoint& given) : Ranking(given) {
        for (Int place = 0; place < given.names; ++place) columns[given.name[place]] = given.column[place];
    }

    // Without candidates the post ids of the history that the model does not read come last.
    Int read(const char* body, Int length, bool has_candidates) {
        Reader reader(words, columns, history, candidates, body, length);
        reader.request(has_candidates);
        Int events = history.count, kept = std::min(events, words.history_length), first = events - kept;
        Int count = candidates.count, older = has_candidates ? 0 : first;
        Head head{reader.user_id, events, kept, count, candidates.written.empty() ? 0 : echo(), static_cast<Int>(reader.rest.size())};
        char* out = room(sizeof head + 8 * (3 * kept + 4 * count + older) + 4 * kept * (words.actions + 1) + head.echo + head.rest);
        for (Id& time : candidates.time) time = age_bucket(reader.impression, time);
        out = copy(out, &head, 1);
        for (auto column : {&history.post, &history.author, &history.surface}) out = copy(out, column->data() + first, kept);
        for (auto column : {&candidates.post, &candidates.author, &candidates.surface, &candidates.time})
            out = copy(out, column->data(), count);
        out = copy(out, history.actions.data() + first * words.actions, kept * words.actions);
        out = copy(out, history.dwell.data() + first, kept);
        if (head.echo) {
            out = copy(out, ends.data(), count);
            out = put(out, texts);
        }
        out = copy(out, history.post.data(), older);
        return copy(out, reader.rest.data(), head.rest) - scratch.data();
    }

    // Scores, their order, best first, and ranks.
    Int rank(const Scored& given) {
        const Int count = given.candidates;
        sort(given);
        char* out = room(24 * count);
        out = copy(out, scores.data(), count);
        out = copy(out, order.data(), count);
        return copy(out, ranks.data(), count) - scratch.data();
    }

    Int write(const Scored& given) {
        sort(given);
        Int rows = given.top_k && given.top_k < given.candidates ? given.top_k : given.candidates;
        chosen.resize(rows);
        if (given.top_k) std::copy_n(order.begin(), rows, chosen.begin());
        else std::iota(chosen.begin(), chosen.end(), 0);
        Int width = given.wanted ? given.wanted_count : words.actions;
        size_t row_bytes = 192 + DOUBLE_BYTES + (width + words.continuous) * FLOAT_BYTES;
        for (Int place = 0; place < words.continuous; ++place) row_bytes += std::strlen(words.key[place]) + 2;
        char* out = room(given.head.size() + given.tail.size() + given.echo.size() + rows * row_bytes + SPARE_BYTES + 512 + 64 * words.continuous);
        out = put(out, given.head);
        out = given.is_columnar ? arrays(out, given, width) : objects(out, given, width);
        return put(out, given.tail) - scratch.data();
    }

    const char* data() const { return scratch.data(); }

    // Where the id of this row ends in the texts of an echo: ends `[C]`, then the texts, each with a comma behind it.
    static Int end_of(string_view echo, Int row) {
        Int end;
        std::memcpy(&end, echo.data() + 8 * row, sizeof end);
        return end;
    }

private:
    std::unordered_map<string_view, Int> columns;
    Posts history, candidates;  // of the last request: their memory is asked for once, and by no thread of its own
    std::vector<char> scratch;
    std::string texts;
    std::vector<Int> chosen, ends;
    std::vector<float> floats;  // that are about to be written
    std::vector<Decimals> decimals;

    // The post ids of candidates as they came, in `texts`, and where each ends, in `ends`; the bytes of both.
    Int echo() {
        ends.clear(), texts.clear();
        candidates.written.resize(candidates.count);
        for (size_t row = 0; row < candidates.count; ++row) {
            const string_view id = candidates.written[row];
            (id.empty() ? texts += std::to_string(candidates.post[row]) : texts += id) += ',';
            ends.push_back(texts.size());
        }
        return 8 * ends.size() + texts.size();
    }

    char* room(size_t bytes) {
        if (scratch.size() < bytes) scratch.resize(bytes);
        return scratch.data();
    }

    template <class T>
    static char* copy(char* out, const T* from, Int count) {
        if (count) std::memcpy(out, from, sizeof(T) * count);
        return out + sizeof(T) * count;
    }

    Id age_bucket(Id impression, Id created) const {
        if (!created || !impression || created > impression) return 0;
        return std::min<Id>((impression - created) / words.age_seconds + 1, words.age_buckets - 1);
    }

    template <class Each>
    char* list(char* out, Int count, Each each) const {
        for (Int place = 0; place < count; ++place) {
            if (place) *out++ = ',';
            out = each(out, place);
        }
        return out;
    }

    char* id(char* out, const Scored& given, Int row) const {
        if (given.echo.empty()) return std::to_chars(out, out + 24, given.ids[row]).ptr;
        const Int start = row ? end_of(given.echo, row - 1) : 0;
        return put(out, given.echo.substr(8 * given.candidates + start, end_of(given.echo, row) - start - 1));
    }

    // Converts the floats that `number` writes next.
    template <class Value>
    void prepare(Int count, Value value) {
        const size_t blocks = (count + LANES - 1) / LANES;
        floats.resize(blocks * LANES), decimals.resize(blocks);
        for (Int place = 0; place < count; ++place) floats[place] = value(place);
        for (size_t block = 0; block < blocks; ++block) decimals[block] = shortest(&floats[block * LANES]);
    }

    char* number(char* out, Int place) const {
        return codec::write(out, floats[place], decimals[place / LANES], place % LANES);
    }

    float probability(const Scored& given, Int row, Int place) const {
        return given.probabilities[row * words.actions + (given.wanted ? given.wanted[place] : place)];
    }

    char* objects(char* out, const Scored& given, Int width) {
        *out++ = '[';
        const Int last = width + words.continuous;
        for (Int row : chosen) {
            prepare(last + (given.retrieved != nullptr), [&](Int place) {
                return place < width ? probability(given, row, place)
                    : place < last ? continuous(given, row, place - width) : given.retrieved[row];
            });
            out = id(put(out, "{\"post_id\":"), given, row);
            out = codec::write(put(out, ",\"score\":"), scores[row]);
            out = std::to_chars(put(out, ",\"rank\":"), out + 64, ranks[row]).ptr;
            if (given.retrieved) {
                out = number(put(out, ",\"retrieval_score\":"), last);
                out = std::to_chars(put(out, ",\"retrieval_rank\":"), out + 64, row + 1).ptr;
            }
            out = list(put(out, ",\"probabilities\":["), width, [&](char* out, Int place) { return number(out, place); });
            out = put(out, "],\"continuous\":{");
            out = list(out, words.continuous, [&](char* out, Int place) {
                out = put(out, words.key[place]);
                *out++ = ':';
                return number(out, width + place);
            });
            out = put(out, "}},");
        }
        out[-1] = ']';
        return out;
    }

    char* arrays(char* out, const Scored& given, Int width) {
        Int rows = chosen.size();
        out = put(out, "{\"post_id\":[");
        out = list(out, rows, [&](char* out, Int place) { return id(out, given, chosen[place]); });
        out = put(out, "],\"score\":[");
        out = list(out, rows, [&](char* out, Int place) { return codec::write(out, scores[chosen[place]]); });
        out = put(out, "],\"rank\":[");
        out = list(out, rows, [&](char* out, Int place) { return std::to_chars(out, out + 24, ranks[chosen[place]]).ptr; });
        out = put(out, "],\"probabilities\":[");
        out = list(out, rows, [&](char* out, Int place) {
            prepare(width, [&](Int action) { return probability(given, chosen[place], action); });
            *out++ = '[';
            out = list(out, width, [&](char* out, Int action) { return number(out, action); });
            *out++ = ']';
            return out;
        });
        out = put(out, "],\"continuous\":{");
        out = list(out, words.continuous, [&](char* out, Int output) {
            out = put(out, words.key[output]);
            prepare(rows, [&](Int place) { return continuous(given, chosen[place], output); });
            out = list(put(out, ":["), rows, [&](char* out, Int place) { return number(out, place); });
            *out++ = ']';
            return out;
        });
        return put(out, "}}");
    }
};

constexpr char NAME[] = "codec";

Codec* codec_of(Object* capsule) { return static_cast<Codec*>(PyCapsule_GetPointer(capsule, NAME)); }

// Bytes, which are empty where Python should do the work.
template <class Work>
Object* answer(Object* capsule, bool is_complete, Work work) {
    Codec* codec = codec_of(capsule);
    try {
        if (!is_complete) throw Declined();
        Int size = work(*codec);
        return PyBytes_FromStringAndSize(codec->data(), size);
    } catch (...) {
        PyErr_Clear();  // of a number that is none, or too large
        return PyBytes_FromStringAndSize(nullptr, 0);
    }
}

// Of candidates: sizes of columns are made of it.
Int count_of(Object* given) {
    Int count = PyLong_AsLongLong(given);
    if (count <= 0 || count > MOST_CANDIDATES) throw Declined();
    return count;
}

// Of a body, bytes or a bytearray, behind which Python keeps a zero byte, and whether it has candidates.
Object* read_request(Object* capsule, Object* const* given, ssize_t count) {
    return answer(capsule, count == 2, [&](Codec& codec) {
        Bytes text(given[0]);
        return codec.read(text.as<char>(), text.size(), PyLong_AsLongLong(given[1]));
    });
}

// Of candidates: their count, probabilities, continuous outputs and weights, and the two sums of an offset or nothing, are the first five
// arguments.
struct Numbers {
    Int count;
    Bytes probabilities, continuous, weights, offset;

    Numbers(const Checkpoint& words, Object* const* given)
        : count(count_of(given[0])), probabilities(given[1], 4 * count * words.actions),
          continuous(given[2], 4 * count * words.continuous), weights(given[3]), offset(given[4]) {
        const Int weight_count = weights.size() / 8;
        if (weights.size() % 8 || (weight_count != words.actions && weight_count != words.actions + words.continuous)) throw Declined();
        if (offset.size() && offset.size() != 16) throw Declined();
    }

    Scored scored() const {
        Scored found{};
        found.candidates = count, found.weight_count = weights.size() / 8;
        found.probabilities = probabilities.as<float>(), found.continuous = continuous.as<float>();
        found.weights = weights.as<double>(), found.offset = offset.size() ? offset.as<double>() : nullptr;
        return found;
    }
};

Object* rank_candidates(Object* capsule, Object* const* given, ssize_t count) {
    return answer(capsule, count == 5, [&](Codec& codec) { return codec.rank(Numbers(codec.words, given).scored()); });
}

// Whether so many ids can be read of an echo.
bool is_echo(string_view echo, Int count) {
    if (echo.size() < static_cast<size_t>(8 * count)) return false;
    Int end = 0;
    for (Int row = 0, start = 0; row < count; ++row, start = end)
        if ((end = Codec::end_of(echo, row)) <= start || end > static_cast<Int>(echo.size()) - 8 * count) return false;
    return true;
}

// `echo` and `retrieved` may be empty; `wanted` is read unless its count is negative.
Object* write_reply(Object* capsule, Object* const* given, ssize_t count) {
    return answer(capsule, count == 14, [&](Codec& codec) {
        const Numbers numbers(codec.words, given);
        Scored scored = numbers.scored();
        const Int candidates = scored.candidates;
        scored.top_k = PyLong_AsLongLong(given[7]), scored.wanted_count = PyLong_AsLongLong(given[9]);
        scored.is_columnar = PyLong_AsLongLong(given[10]);
        Bytes ids(given[5], 8 * candidates), echo(given[6]), wanted(given[8], 8 * std::max<Int>(scored.wanted_count, 0));
        Bytes retrieved(given[11]), head(given[12]), tail(given[13]);
        if (echo.size() && !is_echo(echo.text(), candidates)) throw Declined();
        if (scored.top_k < 0 || scored.wanted_count > codec.words.actions) throw Declined();
        for (Int place = 0; place < scored.wanted_count; ++place)
            if (Id(wanted.as<Int>()[place]) >= Id(codec.words.actions)) throw Declined();
        if (retrieved.size() && retrieved.size() != 4 * candidates) throw Declined();
        scored.ids = ids.as<Id>(), scored.echo = echo.text(), scored.head = head.text(), scored.tail = tail.text();
        scored.wanted = scored.wanted_count < 0 ? nullptr : wanted.as<Int>();
        scored.retrieved = retrieved.size() ? retrieved.as<float>() : nullptr;
        return codec.write(scored);
    });
}

Method methods[] = {
    {"read", read_request, FASTCALL, nullptr}, {"rank", rank_candidates, FASTCALL, nullptr}, {"write", write_reply, FASTCALL, nullptr}};

}  // namespace
}  // namespace codec

// `read`, `rank` and `write` in the words of a checkpoint, as functions of Python, which keep what they need: calls by ctypes take a
// microsecond and more. Null, with MemoryError set, where memory ends.
extern "C" Object* codec_functions(const codec::Checkpoint* words) {
    using namespace codec;
    try {
        auto made = std::make_unique<Codec>(*words);
        Object* capsule = PyCapsule_New(made.get(), NAME, [](Object* capsule) { delete codec_of(capsule); });
        if (!capsule) return nullptr;
        made.release();
        Object* read = PyCFunction_NewEx(&methods[0], capsule, nullptr);
        Object* rank = PyCFunction_NewEx(&methods[1], capsule, nullptr);
        Object* write = PyCFunction_NewEx(&methods[2], capsule, nullptr);
        Py_DecRef(capsule);
        return Py_BuildValue("(NNN)", read, rank, write);  // which takes them over, and is null where one of them is
    } catch (...) {
        return PyErr_NoMemory();
    }
}
