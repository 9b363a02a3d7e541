// The engine: what it holds, what a thread needs, which steps there are. The steps themselves are in tokens.h, layer.h and
// kernel.cpp.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <vector>

#include "amx.h"
#include "layout.h"
#include "pool.h"

namespace ranker {

constexpr float LOG2_E = 1.44269504f;
constexpr Index MAX_TILE_ROWS = 72;
constexpr Index DWELL_HIDDEN = 64;

#if !defined(RANKER_WORTH_A_THREAD)
#define RANKER_WORTH_A_THREAD 3'000'000
#endif
constexpr Index WORTH_A_THREAD = RANKER_WORTH_A_THREAD;  // multiplications; with fewer, waking another thread gains nothing

// The tanh approximation, as x · sigmoid(2 √(2/π) (x + 0.044715 x³)).
inline Vec gelu(Vec x) {
    const Vec inner = fma(x * x * x, broadcast(0.044715f), x);
    return x * reciprocal(1.0f + exp2(inner * (-2 * 0.7978845608f * LOG2_E)));
}

inline Vec silu(Vec x) { return x * reciprocal(1.0f + exp2(x * -LOG2_E)); }

// What one row's attention to one head has gathered but for its sums of values.
struct Gathered {
    alignas(64) float denominators[MAX_TILE_ROWS * GRAIN] = {};  // sixteen running sums a row
    float peaks[MAX_TILE_ROWS];                                  // the largest logit so far; unused where the cap bounds them
};

struct Free {
    void operator()(void* p) const { std::free(p); }
};
template <class T>
using Buffer = std::unique_ptr<T[], Free>;
template <class T>
Buffer<T> allocate(Index count) {
    void* memory = must_fail() ? nullptr : std::aligned_alloc(64, round_up(count * Index(sizeof(T)) + 64, 64));
    if (memory == nullptr) throw std::bad_alloc();
    return Buffer<T>(static_cast<T*>(memory));
}

template <class T>
class Engine {
  public:
    Engine(const Model& model, Index threads)
        : m_(model),
          padded_(round_up(m_.width, GRAIN)),
          out_columns_(round_up(padded_, PANEL)),
          queries_(m_.query_heads * m_.head_width),
          qkv_columns_(round_up((m_.query_heads + 2 * m_.kv_heads) * m_.head_width, PANEL)),
          value_width_(round_up(m_.head_width, GRAIN)),
          half_panels_((m_.ffn_width + 31) / 32),
          head_columns_(round_up(m_.actions + m_.continuous, PANEL)),
          pool_(threads) {
        for (Index i = 0; i < pool_.size(); ++i) scratch_.emplace_back(*this);
    }

    // Whether every score is finite.
    bool forward(const ContextJob* contexts, Index n_contexts, const CandidateJob* jobs, Index n_jobs, const Candidates& all);
    Pool& pool() { return pool_; }

  private:
    struct Scratch {  // what one thread needs for one tile
        explicit Scratch(const Engine& e)
            : tokens(allocate<float>(MAX_TILE_ROWS * std::max(e.widest_entity() * e.m_.width + GRAIN, DWELL_HIDDEN))),
              hidden(allocate<float>(MAX_TILE_ROWS * e.padded_)),
              wide(allocate<float>(MAX_TILE_ROWS * std::max({e.qkv_columns_, e.out_columns_, e.head_columns_}))),
              normed(allocate<T>(MAX_TILE_ROWS * e.padded_)),
              queries(allocate<T>(MAX_TILE_ROWS * e.queries_)),
              keys(allocate<T>(MAX_TILE_ROWS * e.m_.kv_heads * e.m_.head_width)),
              values(allocate<T>(MAX_TILE_ROWS * e.m_.kv_heads * e.m_.head_width)),
              mixed(allocate<T>(MAX_TILE_ROWS * (e.queries_ + 1))),
              logits(allocate<float>(MAX_TILE_ROWS * PANEL)),
              weights(allocate<T>(MAX_TILE_ROWS * PANEL)),
              sums(allocate<float>(MAX_TILE_ROWS * e.value_width_)),
              activated(allocate<T>(MAX_TILE_ROWS * e.half_panels_ * 32)) {}
        Buffer<float> tokens, hidden, wide;
        Buffer<T> normed, queries, keys, values, mixed;
        Buffer<float> logits;
        Buffer<T> weights;
        Buffer<float> sums;
        Buffer<T> activated;
    };
    struct Tile {
        Index job, first, rows;  // rows first … first + rows - 1 of the job
    };
    struct Work {  // a context in the making: what its tiles leave for their next layer, and how far each has come
        Buffer<float> hidden;
        Buffer<T> queries;
        Index first_tile = 0;
        std::vector<Tile> tiles;
        std::unique_ptr<std::atomic<Index>[]> layers_written;
    };

    Index widest_entity() const { return std::max(m_.user.hashes, m_.post.hashes + m_.author.hashes); }
    Index multiplications_of_a_row() const {
        return m_.layers * m_.width * (qkv_columns_ + queries_ + 3 * m_.ffn_width);
    }
    Index block_elements() const { return PANEL * (m_.head_width + value_width_); }
    std::vector<Tile> cut(Index job, Index rows, Index tiles_wanted) const;

    void check_codes(const Index* codes) const;
    void check(const ContextJob& job) const;
    void check(const CandidateJob& job, Index n_contexts, const Candidates& all) const;
    void context_task(const ContextJob& job, Work& work, Index tile, Index layer, Scratch& s);
    bool candidate_tile(const CandidateJob& job, const Candidates& all, const Tile& tile, Scratch& s);

    void gather(const Entity& entity, Id id, float* out) const;
    void add_codes(const Index* codes, const float* table, float* token) const;
    void context_tokens(const ContextJob& job, const Tile& tile, float* hidden, Scratch& s) const;
    void candidate_tokens(const Candidates& all, Index first, Index rows, float* hidden, Scratch& s) const;
    void add(float* row, const float* other, float factor = 1.0f) const {
        for (Index i = 0; i < padded_; i += LANES) store(row + i, fma(load(other + i), broadcast(factor), load(row + i)));
    }

    float norm_factor(const float* row) const;
    void norm(const float* rows, Index count, const float* scale, T* out) const;
    void add_normed(float* hidden, const float* rows, Index stride, Index count, const float* scale) const;
    void query_key_value(const Layer& layer, const float* hidden, Index rows, const Index* positions, T* queries, Scratch& s) const;
    void rotate(const float* in, Index position, T* out) const;
    void attend(const T* queries, Index rows, const T* head_keys, Index blocks, Index first_limit, Index limit_step, Scratch& s,
                Gathered& gathered) const;
    void finish_layer(const Layer& layer, float* hidden, Index rows, Scratch& s) const;

    const Model m_;
    const Index padded_, out_columns_, queries_, qkv_columns_, value_width_, half_panels_, head_columns_;
    Pool pool_;
    std::vector<Scratch> scratch_;
};

}  // namespace ranker
