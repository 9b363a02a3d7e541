// Probabilities → combined scores, their order and ranks: the same bits as model/ranking.py.
#pragma once
#include <cmath>
#include <numeric>

#include "reader.h"

namespace codec {

constexpr Int MOST_IN_A_BUCKET = 32;

struct Scored {
    Int candidates;
    const Id* ids;
    string_view echo;  // as `read` gives it: the ids as they are to be written; empty: as integers
    const float *probabilities, *continuous;
    const double* weights;  // of the actions, and perhaps of the continuous outputs
    Int weight_count;
    const double* offset;  // sums as of `model.ranking.magnitudes`, if scores are to be lifted above 0; null: they are not
    Int top_k;          // 0: all
    const Int* wanted;  // columns; null: all
    Int wanted_count, is_columnar;
    const float* retrieved;  // scores of candidates that were retrieved, best first; null: they came with the request
    string_view head, tail;  // what comes before and after the candidates
};

class Ranking {
public:
    const Checkpoint words;

    explicit Ranking(const Checkpoint& given) : words(given) {}

protected:
    std::vector<double> scores;
    std::vector<Int> order, ranks;

    float continuous(const Scored& given, Int row, Int output) const {
        return given.continuous[row * words.continuous + output] * words.scale[output];
    }

    // Combined scores, added action by action from 0 on, as `model.ranking` has them; best first, equal ones in their order.
    void sort(const Scored& given) {
        const Int count = given.candidates, outputs = given.weight_count - words.actions;
        scores.assign(count, 0.0), order.resize(count), ranks.resize(count);
        for (Int row = 0; row < count; ++row) {
            double& score = scores[row];
            for (Int action = 0; action < words.actions; ++action)
                score += given.probabilities[row * words.actions + action] * given.weights[action];
            for (Int output = 0; output < outputs; ++output)
                score += continuous(given, row, output) * given.weights[words.actions + output];
            if (given.offset) score = score >= 0 ? score + 0.001 : (score + given.offset[0]) / given.offset[1] * 0.001;
            if (!std::isfinite(score)) throw Declined();
        }
        distribute(count);
        for (Int place = 0; place < count; ++place) ranks[order[place]] = place + 1;
    }

private:
    std::vector<Int> buckets, ends;

    // The order: into as many buckets as there are scores, then by insertion, which moves few of them and none out of its bucket. A
    // sort by comparing takes three times as long, since no processor can guess it ahead; where a bucket is crowded, it comes to that.
    void distribute(Int count) {
        const auto [least, most] = std::minmax_element(scores.begin(), scores.end());
        const double best = *most, step = count / (best - *least);  // monotonic in spite of rounding, as are all steps to a bucket
        auto is_better = [&](Int left, Int right) { return scores[left] > scores[right]; };
        std::iota(order.begin(), order.end(), 0);
        if (!std::isnormal(step)) return std::stable_sort(order.begin(), order.end(), is_better);
        buckets.resize(count), ends.assign(count + 2, 0);
        for (Int row = 0; row < count; ++row) buckets[row] = (best - scores[row]) * step, ++ends[buckets[row] + 1];
        const bool is_crowded = *std::max_element(ends.begin(), ends.end()) > MOST_IN_A_BUCKET;
        std::partial_sum(ends.begin(), ends.end(), ends.begin());
        for (Int row = 0; row < count; ++row) order[ends[buckets[row]]++] = row;
        if (is_crowded) return std::stable_sort(order.begin(), order.end(), is_better);
        for (Int place = 1; place < count; ++place) {
            const Int row = order[place];
            Int at = place;
            for (; at && is_better(row, order[at - 1]); --at) order[at] = order[at - 1];
            order[at] = row;
        }
    }
};

}  // namespace codec
