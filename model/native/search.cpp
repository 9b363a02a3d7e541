// Exact search: the best rows of a corpus for some queries by their fp32 products, ties by row.
//
// A scan over rows of 8 bits finds, with a bound on what rounding can have changed, the rows that can be among the best;
// those alone are scored in fp32. So the answer is that of scoring every row, and a score is a fixed sequence of
// operations on its row and query alone. Derivation of the bound: model/retrieval/search.py.

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <vector>

#include "layout.h"
#include "pool.h"
#include "vector.h"

namespace ranker {

constexpr Index QUERIES = 3;       // that one pass over a panel serves: 24 accumulators, 4 rows and a broadcast fill 32 registers
constexpr Index TASK_PANELS = 64;  // of one task: 4 096 rows
constexpr Index LEAST_KEPT = 1024;
constexpr float UNIT_ROUNDOFF = 5.9604645e-8f;  // 2^-24
constexpr float UP = 1.000001f;                 // more than what a few roundings to float can take away
#if !defined(RANKER_BOUND_SHARE)
#define RANKER_BOUND_SHARE 1  // less for the negative control of tests: then rows are missed
#endif

struct Candidate {
    Index row;
    float lower, upper;  // the score's bounds; once scored, both are the score
};

inline bool better(const Candidate& a, const Candidate& b) { return a.lower > b.lower || (a.lower == b.lower && a.row < b.row); }

// The score. Sixteen running sums, a product at a time, then their total as a tree: no fma, so that numpy gets the same bits.
inline float score(const float* row, const float* query, Index width) {
    return sum(
        width, [&](Index i, Vec so_far) { return so_far + load(row + i) * load(query + i); },
        [&](Index i) { return row[i] * query[i]; });
}

// A query in 16 bits, as two planes of 8: query ~ step * (128 * high + low).
struct Query {
    const float* values;
    std::vector<std::int32_t> high, low;  // four elements in each
    std::int32_t high_offset = 0, low_offset = 0;  // what the offset of 128 in the rows adds
    float step = 0, norm = 0, slack = 0;

    Query(const float* query, Index width, float longest) : values(query), high((width + 3) / 4), low((width + 3) / 4) {
        float largest = 0;
        for (Index i = 0; i < width; ++i) largest = std::max(largest, std::fabs(query[i]));
        step = largest / 16256;
        double squares = 0, missed = 0, kept = 0, lows = 0;
        for (Index i = 0; i < width; ++i) {
            const long whole = step > 0 ? std::lrint(query[i] / double(step)) : 0;
            const long top = (whole + 64) >> 7, rest = whole - top * 128;
            reinterpret_cast<std::int8_t*>(high.data())[i] = std::int8_t(top);
            reinterpret_cast<std::int8_t*>(low.data())[i] = std::int8_t(rest);
            high_offset += 128 * std::int32_t(top);
            low_offset += 128 * std::int32_t(rest);
            const double value = double(step) * whole, part = double(step) * rest;
            squares += double(query[i]) * query[i];
            missed += (query[i] - value) * (query[i] - value);
            kept += value * value;
            lows += part * part;
        }
        norm = float(std::sqrt(squares)) * UP;
        slack = float((std::sqrt(missed) + 16 * UNIT_ROUNDOFF * (std::sqrt(kept) + 2 * std::sqrt(lows))) * longest) * UP + FLT_MIN;
    }
};

// What one thread has found for one query.
class Found {
  public:
    void push(const Candidate& candidate, Index k, std::atomic<float>& threshold) {
        rows.push_back(candidate);
        if (Index(rows.size()) < limit_) return;
        prune(k, threshold);
        limit_ = std::max({limit_, 2 * Index(rows.size()), 2 * k});
    }
    // Raises the threshold to the k-th best lower bound, and drops what lies below it.
    void prune(Index k, std::atomic<float>& threshold) {
        if (Index(rows.size()) >= k) {
            std::nth_element(rows.begin(), rows.begin() + (k - 1), rows.end(), better);
            const float reached = rows[k - 1].lower;
            float known = threshold.load();
            while (known < reached && !threshold.compare_exchange_weak(known, reached)) {}
        }
        const float least = threshold.load();
        rows.erase(std::remove_if(rows.begin(), rows.end(), [&](const Candidate& c) { return c.upper < least; }), rows.end());
    }
    std::vector<Candidate> rows;
    Index visible = 0;

  private:
    Index limit_ = LEAST_KEPT;
};

// One query's wishes and results, as Python hands them over; mirrored in model/native/search.py.
struct Wish {
    const float* query;            // [width]
    const std::uint64_t* visible;  // a bit a row, or null for all
    Index k;
    float least;                   // the least score; -inf for none
    Index found, seen, scored;     // results: rows returned, visible rows, rows that were scored in fp32
    Index* rows;                   // [k]
    float* scores;                 // [k]
};

class Search {
  public:
    Search(const float* vectors, Index rows, Index width, Index threads)
        : vectors_(vectors), rows_(rows), width_(width), steps_((width + 3) / 4), panels_((rows + PANEL - 1) / PANEL), pool_(threads) {
        packed_.reset(allocate<std::uint8_t>(panels_ * PANEL * steps_ * 4));
        scales_.reset(allocate<float>(panels_ * PANEL));
        radii_.reset(allocate<float>(panels_ * PANEL));
        std::vector<float> longest(pool_.size());
        pool_.run(panels_, [&](long panel, long thread) { pack(panel, longest[thread]); });
        longest_ = *std::max_element(longest.begin(), longest.end());
    }
    Pool& pool() { return pool_; }

    void run(Wish* wishes, Index count) {
        for (Index q = 0; q < count; ++q) {
            RANKER_CHECK(wishes[q].k > 0 && wishes[q].k <= rows_ && !std::isnan(wishes[q].least));
            RANKER_CHECK(std::all_of(wishes[q].query, wishes[q].query + width_, [](float x) { return std::isfinite(x); }));
        }
        std::vector<Query> queries;
        for (Index q = 0; q < count; ++q) queries.emplace_back(wishes[q].query, width_, longest_);
        std::unique_ptr<std::atomic<float>[]> thresholds(new std::atomic<float>[count]);
        for (Index q = 0; q < count; ++q) thresholds[q] = wishes[q].least;
        std::vector<std::vector<Found>> found(pool_.size(), std::vector<Found>(count));
        std::atomic<bool> failed{false};
        pool_.run((panels_ + TASK_PANELS - 1) / TASK_PANELS, [&](long task, long thread) {
            try {
                const Index stop = std::min(panels_, (task + 1) * TASK_PANELS);
                for (Index panel = task * TASK_PANELS; panel < stop; ++panel)
                    for (Index q = 0; q < count; q += QUERIES) scan(panel, wishes, queries, q, std::min(QUERIES, count - q), thresholds.get(), found[thread].data());
            } catch (...) {
                failed = true;
            }
        });
        if (failed) throw std::bad_alloc();
        for (Index q = 0; q < count; ++q) finish(wishes[q], q, thresholds[q], found);
    }

  private:
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    template <class T>
    static T* allocate(Index count) {
        void* memory = must_fail() ? nullptr : std::aligned_alloc(64, round_up(count * Index(sizeof(T)) + 64, 64));
        if (memory == nullptr) throw std::bad_alloc();
        return static_cast<T*>(memory);
    }

    // Rows of a panel as bytes 128 + round(x / scale), four elements of 64 rows at a time; scale = max|x| / 127.
    void pack(Index panel, float& longest) {
        const float rounding = float(width_ / GRAIN + 8) * 2 * UNIT_ROUNDOFF;  // of the fp32 score, in units of both norms
        std::uint8_t* out = packed_.get() + panel * PANEL * steps_ * 4;
        for (Index r = 0; r < PANEL; ++r) {
            const Index row = panel * PANEL + r;
            const float* x = vectors_ + row * width_;
            float largest = 0;
            for (Index i = 0; row < rows_ && i < width_; ++i) largest = std::max(largest, std::fabs(x[i]));
            const float scale = largest / 127;
            double missed = 0, squares = 0, kept = 0;
            for (Index i = 0; i < 4 * steps_; ++i) {
                const float value = row < rows_ && i < width_ ? x[i] : 0;
                const long whole = scale > 0 ? std::clamp(std::lrint(value / double(scale)), -127L, 127L) : 0;
                const double rounded = double(scale) * whole;
                out[(i / 4 * PANEL + r) * 4 + i % 4] = std::uint8_t(128 + whole);
                missed += (value - rounded) * (value - rounded);
                squares += double(value) * value;
                kept += rounded * rounded;
            }
            scales_[row] = scale;
            radii_[row] = RANKER_BOUND_SHARE * float(std::sqrt(missed) + rounding * std::sqrt(squares)) * UP;
            longest = std::max(longest, float(std::sqrt(kept)) * UP);
        }
    }

    // Products of 64 rows with N queries: sums[query][plane][row], the rows' offset still in them.
    template <int N>
    void products(const std::uint8_t* rows, const Query* queries, std::int32_t (*sums)[2][PANEL]) const {
#if defined(__AVX512VNNI__)
        __m512i totals[N][2][4];
        for (auto& query : totals)
            for (auto& plane : query)
                for (auto& total : plane) total = _mm512_setzero_si512();
        for (Index step = 0; step < steps_; ++step, rows += 4 * PANEL) {
            __m512i row[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) row[i] = _mm512_loadu_si512(rows + 64 * i);
#pragma GCC unroll 3
            for (int q = 0; q < N; ++q) {
                const __m512i high = _mm512_set1_epi32(queries[q].high[step]), low = _mm512_set1_epi32(queries[q].low[step]);
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    totals[q][0][i] = _mm512_dpbusd_epi32(totals[q][0][i], row[i], high);
                    totals[q][1][i] = _mm512_dpbusd_epi32(totals[q][1][i], row[i], low);
                }
            }
        }
        std::memcpy(sums, totals, sizeof(totals));
#else
        std::memset(sums, 0, N * sizeof(*sums));
        for (Index step = 0; step < steps_; ++step, rows += 4 * PANEL)
            for (int q = 0; q < N; ++q)
                for (int plane = 0; plane < 2; ++plane) {
                    const auto* part = reinterpret_cast<const std::int8_t*>((plane ? queries[q].low : queries[q].high).data() + step);
                    for (Index r = 0; r < PANEL; ++r)
                        for (int i = 0; i < 4; ++i) sums[q][plane][r] += std::int32_t(rows[4 * r + i]) * part[i];
                }
#endif
    }

    void scan(Index panel, const Wish* wishes, const std::vector<Query>& queries, Index first, Index count,
              std::atomic<float>* thresholds, Found* found) const {
        alignas(64) std::int32_t sums[QUERIES][2][PANEL];
        const std::uint8_t* rows = packed_.get() + panel * PANEL * steps_ * 4;
        const Query* these = queries.data() + first;
        if (count == 3) products<3>(rows, these, sums);
        else if (count == 2) products<2>(rows, these, sums);
        else products<1>(rows, these, sums);
        const Index left = rows_ - panel * PANEL;
        const std::uint64_t present = left >= PANEL ? ~std::uint64_t(0) : (std::uint64_t(1) << left) - 1;
        for (Index q = 0; q < count; ++q) {
            const Wish& wish = wishes[first + q];
            std::uint64_t visible = wish.visible ? wish.visible[panel] & present : present;
            found[first + q].visible += __builtin_popcountll(visible);
            if (visible) collect(panel, sums[q], these[q], wish.k, visible, thresholds[first + q], found[first + q]);
        }
    }

    // Keeps the visible rows of a panel whose upper bound reaches the threshold.
    void collect(Index panel, const std::int32_t (*sums)[PANEL], const Query& query, Index k, std::uint64_t visible,
                 std::atomic<float>& threshold, Found& found) const {
        alignas(64) float values[PANEL], bounds[PANEL];
        const Vec least = broadcast(threshold.load(std::memory_order_relaxed));
        for (Index i = 0; i < PANEL; i += LANES) {
            const Index row = panel * PANEL + i;
            const IntVec high = *reinterpret_cast<const IntVec*>(sums[0] + i) - query.high_offset;
            const IntVec low = *reinterpret_cast<const IntVec*>(sums[1] + i) - query.low_offset;
            const Vec whole = __builtin_convertvector(high, Vec) * 128.0f + __builtin_convertvector(low, Vec);
            const Vec value = whole * (load(scales_.get() + row) * query.step);
            const Vec bound = load(radii_.get() + row) * query.norm + query.slack;
            store(values + i, value);
            store(bounds + i, bound);
            visible &= ~(below(value + bound, least) << i);
        }
        for (; visible; visible &= visible - 1) {
            const int r = __builtin_ctzll(visible);
            found.push({panel * PANEL + r, values[r] - bounds[r], values[r] + bounds[r]}, k, threshold);
        }
    }

    // A bit for each lane of a that is below b.
    static std::uint64_t below(Vec a, Vec b) {
#if defined(__AVX512F__)
        return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ);
#elif defined(__AVX2__) && defined(__FMA__)
        return std::uint64_t(_mm256_movemask_ps((__m256)(a < b)));
#else
        std::uint64_t bits = 0;
        for (Index i = 0; i < LANES; ++i) bits |= std::uint64_t(a[i] < b[i]) << i;
        return bits;
#endif
    }

    // Joins what the threads found, scores it in fp32, and keeps the best k.
    void finish(Wish& wish, Index q, std::atomic<float>& threshold, std::vector<std::vector<Found>>& found) {
        Found all;
        wish.seen = 0;
        for (auto& of_thread : found) {
            all.rows.insert(all.rows.end(), of_thread[q].rows.begin(), of_thread[q].rows.end());
            wish.seen += of_thread[q].visible;
        }
        all.prune(wish.k, threshold);
        wish.scored = Index(all.rows.size());
        constexpr Index SLICE = 256;
        pool_.run((wish.scored + SLICE - 1) / SLICE, [&](long slice, long) {
            for (Index i = slice * SLICE; i < std::min(wish.scored, (slice + 1) * SLICE); ++i) {
                Candidate& candidate = all.rows[i];
                candidate.lower = candidate.upper = score(vectors_ + candidate.row * width_, wish.query, width_);
            }
        });
        const auto end = std::remove_if(all.rows.begin(), all.rows.end(), [&](const Candidate& c) { return c.lower < wish.least; });
        wish.found = std::min(wish.k, Index(end - all.rows.begin()));
        std::partial_sort(all.rows.begin(), all.rows.begin() + wish.found, end, better);
        for (Index i = 0; i < wish.found; ++i) {
            wish.rows[i] = all.rows[i].row;
            wish.scores[i] = all.rows[i].lower;
        }
    }

    const float* vectors_;
    const Index rows_, width_, steps_, panels_;
    Pool pool_;
    std::unique_ptr<std::uint8_t, Free> packed_;
    std::unique_ptr<float[], Free> scales_, radii_;
    float longest_ = 0;
};

constexpr Member SEARCH_MEMBERS[] = {
    {"Wish", 0, sizeof(Wish)},
#define AT(member) {"Wish." #member, offsetof(Wish, member), sizeof(Wish::member)}
    AT(query), AT(visible), AT(k), AT(least), AT(found), AT(seen), AT(scored), AT(rows), AT(scores),
#undef AT
    {nullptr, 0, 0},
};

template <class Body>
std::int64_t guarded(Body body) noexcept {
    try {
        body();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    } catch (...) {
        return 2;
    }
}

}  // namespace ranker

extern "C" {

const ranker::Member* ranker_members() noexcept { return ranker::SEARCH_MEMBERS; }

// The rows stay the caller's; they must not change as long as the index lives.
std::int64_t search_create(const float* vectors, std::int64_t rows, std::int64_t width, std::int64_t threads, void** made) noexcept {
    RANKER_CHECK(rows > 0 && width > 0 && threads > 0);
    return ranker::guarded([&] { *made = new ranker::Search(vectors, rows, width, threads); });
}

void search_destroy(void* handle) noexcept { delete static_cast<ranker::Search*>(handle); }

std::int64_t search_run(void* handle, ranker::Wish* wishes, std::int64_t count) noexcept {
    return ranker::guarded([&] { static_cast<ranker::Search*>(handle)->run(wishes, count); });
}

#if defined(RANKER_TEST_HOOKS)
void ranker_fail_after(std::int64_t steps) noexcept { ranker::steps_to_failure = steps; }
#endif
}
