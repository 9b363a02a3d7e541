// The ranker on a CPU: contexts once, candidates against their keys and values, a tile of rows at a time through all of
// its layers. Exact in this sense: a row's numbers do not depend on its tile, its neighbours or the number of threads.
//
// A context is made of tasks (layer, tile): finish layer l-1 of the tile, then write its keys and values of layer l.
// The last layer stops there, since nothing reads a context row's output. A candidate tile is one task through all
// layers. Tasks wait for the tiles they read from by counters; the pool's claim order makes that free of deadlock.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <vector>

#include "amx.h"
#include "pool.h"
#include "stages.h"

namespace ranker {

using Index = std::int64_t;

inline Index round_up(Index n, Index step) { return (n + step - 1) / step * step; }

// All widths are in elements; every matrix is packed in panels of 64 columns, depth padded with zero rows.
struct Layer {
    const float *attention_norm, *attention_post_norm, *ffn_norm, *ffn_post_norm;  // [padded width]
    const void* query_key_value;                                                   // [padded width, (N + 2G) K]
    const void* output;                                                            // [N K, width]
    const void* gate_value;  // [padded width, F] twice, a panel holding 32 gate columns and their 32 value columns
    const void* ffn_output;  // [32 * panels of gate_value, width]
};

struct Entity {
    const void* table;  // [rows, width] fp32 or bf16, never copied
    Index hashes;
};

struct Model {
    Index width, layers, query_heads, kv_heads, head_width, ffn_width, actions, continuous, tables_bf16, bidirectional;
    float attention_multiplier, attention_cap, norm_epsilon;
    float unused;
    const Layer* layer;
    Entity user, post, author;
    const float *user_projection, *history_projection, *candidate_projection;  // packed fp32; the hash embeddings' rows only
    const float *action_tokens, *history_surfaces, *candidate_surfaces;         // the other features, already projected
    const float *dwell_input, *dwell_output;  // [64]; [64, padded width], projected; null without the feature
    const float* post_ages;                   // [buckets, padded width], projected; null without the feature
    const float *final_norm, *heads;          // [padded width]; packed fp32 [padded width, A + Z]
    const float *cosines, *sines;             // [positions, head width]
};

// Rows of a context that are not in its keys yet. `keys` holds the rows before `start` already.
struct ContextJob {
    Index rows, start, blocks, has_user;  // blocks: capacity of `keys`; has_user: the first row is the user
    void* keys;
    const Index *user_rows, *post_rows, *author_rows, *surfaces, *positions;  // per row; the user row's history entries unread
    const float *actions, *dwell_seconds;
};

struct CandidateJob {
    Index rows, keys_count, blocks, context;  // context: index of the job that makes the keys, or -1
    const void* keys;
    const Index *post_rows, *author_rows, *surfaces, *ages, *positions;
    float *logits, *probabilities, *continuous;
};

constexpr float LOG2_E = 1.44269504f;
constexpr Index MAX_TILE_ROWS = 72;
constexpr Index DWELL_HIDDEN = 64;

// The tanh approximation, as x · sigmoid(2 √(2/π) (x + 0.044715 x³)).
inline Vec gelu(Vec x) {
    const Vec inner = fused(x * x * x, broadcast(0.044715f), x);
    return x * reciprocal(1.0f + exp2(inner * (-2 * 0.7978845608f * LOG2_E)));
}

struct Free {
    void operator()(void* p) const { std::free(p); }
};
template <class T>
using Buffer = std::unique_ptr<T[], Free>;
template <class T>
Buffer<T> allocate(Index count) {
    return Buffer<T>(static_cast<T*>(std::aligned_alloc(64, round_up(count * Index(sizeof(T)) + 64, 64))));
}

template <class T>
class Engine {
  public:
    Engine(const Model& model, Index threads)
        : m_(model),
          padded_(round_up(m_.width, LANES)),
          out_columns_(round_up(padded_, PANEL)),
          queries_(m_.query_heads * m_.head_width),
          qkv_columns_(round_up((m_.query_heads + 2 * m_.kv_heads) * m_.head_width, PANEL)),
          value_width_(round_up(m_.head_width, LANES)),
          half_panels_((m_.ffn_width + 31) / 32),
          head_columns_(round_up(m_.actions + m_.continuous, PANEL)),
          pool_(threads) {
        for (Index i = 0; i < threads; ++i) scratch_.emplace_back(*this);
    }

    void forward(const ContextJob* contexts, Index n_contexts, const CandidateJob* candidates, Index n_candidates);

  private:
    struct Scratch {  // what one thread needs for one tile
        explicit Scratch(const Engine& e)
            : tokens(allocate<float>(MAX_TILE_ROWS * (e.widest_entity() * e.m_.width + LANES))),
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
    Index block_elements() const { return PANEL * (m_.head_width + value_width_); }
    std::vector<Tile> cut(Index job, Index rows, Index tiles_wanted) const;

    void context_task(const ContextJob& job, Work& work, Index tile, Index layer, Scratch& s);
    void candidate_tile(const CandidateJob& job, const Tile& tile, Scratch& s);

    void gather(const Entity& entity, const Index* rows, float* out) const;
    void context_tokens(const ContextJob& job, const Tile& tile, float* hidden, Scratch& s) const;
    void candidate_tokens(const CandidateJob& job, const Tile& tile, float* hidden, Scratch& s) const;
    void add(float* row, const float* other, float factor = 1.0f) const {
        for (Index i = 0; i < padded_; i += LANES) store(row + i, fused(load(other + i), broadcast(factor), load(row + i)));
    }

    float norm_factor(const float* row) const;
    void norm(const float* rows, Index count, const float* scale, T* out) const;
    void add_normed(float* hidden, const float* rows, Index stride, Index count, const float* scale) const;
    void query_key_value(const Layer& layer, const float* hidden, Index rows, const Index* positions, T* queries, Scratch& s) const;
    void rotate(const float* in, Index position, T* out) const;
    void attend(const T* queries, Index rows, const T* head_keys, Index blocks, Index first_limit, Index limit_step, Scratch& s,
                float* denominators) const;
    void finish_layer(const Layer& layer, float* hidden, Index rows, Scratch& s) const;

    const Model m_;
    const Index padded_, out_columns_, queries_, qkv_columns_, value_width_, half_panels_, head_columns_;
    Pool pool_;
    std::vector<Scratch> scratch_;
};

// ---------------------------------------------------------------------------------------------------- tokens

template <class T>
void Engine<T>::gather(const Entity& entity, const Index* rows, float* out) const {
    for (Index j = 0; j < entity.hashes; ++j, out += m_.width) {
        if (rows[j] == 0) {
            std::fill_n(out, m_.width, 0.0f);
        } else if (m_.tables_bf16) {
            const bf16* row = static_cast<const bf16*>(entity.table) + rows[j] * m_.width;
            for (Index i = 0; i < m_.width; ++i) out[i] = widen(row[i]);
        } else {
            std::memcpy(out, static_cast<const float*>(entity.table) + rows[j] * m_.width, m_.width * sizeof(float));
        }
    }
}

// Tokens are made in fp32 and then take the model's dtype, as the published pipeline does it.
template <class T>
void round_rows(const float* in, Index stride, Index rows, Index width, float* out) {
    for (Index r = 0; r < rows; ++r)
        for (Index i = 0; i < width; ++i) out[r * width + i] = widen(narrow<T>(in[r * stride + i]));
}

template <class T>
void Engine<T>::context_tokens(const ContextJob& job, const Tile& tile, float* hidden, Scratch& s) const {
    const Index depth = (m_.post.hashes + m_.author.hashes) * m_.width;
    const Index user = job.has_user && tile.first == 0;
    float* wide = s.wide.get();
    for (Index r = user; r < tile.rows; ++r) {
        const Index row = tile.first + r;
        gather(m_.post, job.post_rows + row * m_.post.hashes, s.tokens.get() + r * depth);
        gather(m_.author, job.author_rows + row * m_.author.hashes, s.tokens.get() + r * depth + m_.post.hashes * m_.width);
    }
    multiply(s.tokens.get() + user * depth, depth, tile.rows - user, m_.history_projection, depth, out_columns_,
             wide + user * out_columns_, out_columns_);
    for (Index r = user; r < tile.rows; ++r) {
        const Index row = tile.first + r;
        float* token = wide + r * out_columns_;
        const float* actions = job.actions + row * m_.actions;
        if (std::any_of(actions, actions + m_.actions, [](float a) { return a != 0; }))
            for (Index a = 0; a < m_.actions; ++a) add(token, m_.action_tokens + a * padded_, 2 * actions[a] - 1);
        add(token, m_.history_surfaces + job.surfaces[row] * padded_);
        if (m_.dwell_input) {
            const float share = std::min(std::max(job.dwell_seconds[row], 0.0f), 30.0f) / 30.0f;
            float hidden_dwell[DWELL_HIDDEN];
            for (Index i = 0; i < DWELL_HIDDEN; i += LANES) store(hidden_dwell + i, gelu(load(m_.dwell_input + i) * share));
            for (Index i = 0; i < DWELL_HIDDEN; ++i) add(token, m_.dwell_output + i * padded_, hidden_dwell[i]);
        }
    }
    if (user) {
        gather(m_.user, job.user_rows, s.tokens.get());
        multiply(s.tokens.get(), 0, 1, m_.user_projection, m_.user.hashes * m_.width, out_columns_, wide, out_columns_);
    }
    round_rows<T>(wide, out_columns_, tile.rows, padded_, hidden);
}

template <class T>
void Engine<T>::candidate_tokens(const CandidateJob& job, const Tile& tile, float* hidden, Scratch& s) const {
    const Index depth = (m_.post.hashes + m_.author.hashes) * m_.width;
    for (Index r = 0; r < tile.rows; ++r) {
        const Index row = tile.first + r;
        gather(m_.post, job.post_rows + row * m_.post.hashes, s.tokens.get() + r * depth);
        gather(m_.author, job.author_rows + row * m_.author.hashes, s.tokens.get() + r * depth + m_.post.hashes * m_.width);
    }
    float* wide = s.wide.get();
    multiply(s.tokens.get(), depth, tile.rows, m_.candidate_projection, depth, out_columns_, wide, out_columns_);
    for (Index r = 0; r < tile.rows; ++r) {
        add(wide + r * out_columns_, m_.candidate_surfaces + job.surfaces[tile.first + r] * padded_);
        if (m_.post_ages) add(wide + r * out_columns_, m_.post_ages + job.ages[tile.first + r] * padded_);
    }
    round_rows<T>(wide, out_columns_, tile.rows, padded_, hidden);
}

// ---------------------------------------------------------------------------------------------------- layer

// 1 / sqrt(mean(x²) + ε); the padding beyond `width` is zero and adds nothing.
template <class T>
float Engine<T>::norm_factor(const float* row) const {
    Vec squares = {};
    for (Index i = 0; i < padded_; i += LANES) squares = fused(load(row + i), load(row + i), squares);
    return 1.0f / std::sqrt(total(squares) / float(m_.width) + m_.norm_epsilon);
}

template <class T>
void Engine<T>::norm(const float* rows, Index count, const float* scale, T* out) const {
    for (Index r = 0; r < count; ++r, rows += padded_, out += padded_) {
        const Vec factor = broadcast(norm_factor(rows));
        for (Index i = 0; i < padded_; i += LANES) narrow_store(out + i, load(rows + i) * factor * load(scale + i));
    }
}

template <class T>
void Engine<T>::add_normed(float* hidden, const float* rows, Index stride, Index count, const float* scale) const {
    for (Index r = 0; r < count; ++r, hidden += padded_, rows += stride) {
        const Vec factor = broadcast(norm_factor(rows));
        for (Index i = 0; i < padded_; i += LANES) store(hidden + i, load(hidden + i) + load(rows + i) * factor * load(scale + i));
    }
}

// x·cos + concat(-x2, x1)·sin for one head.
template <class T>
void Engine<T>::rotate(const float* in, Index position, T* out) const {
    const Index half = m_.head_width / 2;
    const float *cosines = m_.cosines + position * m_.head_width, *sines = m_.sines + position * m_.head_width;
    each(
        half,
        [&](Index i) {
            const Vec first = load(in + i), second = load(in + half + i), cosine = load(cosines + i), sine = load(sines + i);
            narrow_store(out + i, first * cosine - second * sine);
            narrow_store(out + half + i, second * cosine + first * sine);
        },
        [&](Index i) {
            out[i] = narrow<T>(in[i] * cosines[i] - in[half + i] * sines[i]);
            out[half + i] = narrow<T>(in[half + i] * cosines[i] + in[i] * sines[i]);
        });
}

// Norm, project, rotate: queries to `queries`, keys and values to the scratch, all row by row.
template <class T>
void Engine<T>::query_key_value(const Layer& layer, const float* hidden, Index rows, const Index* positions, T* queries,
                                Scratch& s) const {
    mark(NORMS);
    norm(hidden, rows, layer.attention_norm, s.normed.get());
    mark(QUERY_KEY_VALUE);
    const Index skip = queries ? 0 : queries_ / PANEL * PANEL;  // whole panels of queries that nobody asks for
    const T* weights = static_cast<const T*>(layer.query_key_value) + skip * padded_;
    multiply(s.normed.get(), padded_, rows, weights, padded_, qkv_columns_ - skip, s.wide.get() + skip, qkv_columns_);
    mark(ROPE);
    const Index width = m_.head_width, kv = m_.kv_heads * width;
    for (Index r = 0; r < rows; ++r) {
        const float* wide = s.wide.get() + r * qkv_columns_;
        for (Index n = 0; queries && n < m_.query_heads; ++n)
            rotate(wide + n * width, positions[r], queries + r * queries_ + n * width);
        for (Index g = 0; g < m_.kv_heads; ++g)
            rotate(wide + queries_ + g * width, positions[r], s.keys.get() + r * kv + g * width);
        const float* values = wide + queries_ + kv;
        T* out = s.values.get() + r * kv;
        each(kv, [&](Index i) { narrow_store(out + i, load(values + i)); }, [&](Index i) { out[i] = narrow<T>(values[i]); });
    }
}

// exp(cap · tanh(x · multiplier / cap) − cap), which is exp(−2 cap / (1 + exp(2 x multiplier / cap))): the cap bounds the
// logits, so a constant stands in for the running maximum and a key adds to the sums whatever the other keys are.
struct CappedExp {
    float inner, outer;
    CappedExp(float multiplier, float cap) : inner(2 * multiplier / cap * LOG2_E), outer(-2 * cap * LOG2_E) {}
    Vec operator()(Vec x) const { return exp2(outer * reciprocal(1.0f + exp2(x * inner))); }
};

// Adds to s.sums [rows, value_width] and denominators [rows, 16] what `rows` queries of one head see in the key blocks.
// Row r sees keys 0 … first_limit + r · limit_step − 1; a masked key adds exactly nothing.
template <class T>
void Engine<T>::attend(const T* queries, Index rows, const T* head_keys, Index blocks, Index first_limit, Index limit_step,
                       Scratch& s, float* denominators) const {
    const CappedExp capped(m_.attention_multiplier, m_.attention_cap);
    const T* head_values = head_keys + blocks * PANEL * m_.head_width;
    const Index last_limit = first_limit + (rows - 1) * limit_step;
    for (Index b = 0; b * PANEL < last_limit; ++b) {
        mark(LOGITS);
        product<T, 4, false>(queries, queries_, rows, head_keys + b * PANEL * m_.head_width, m_.head_width, s.logits.get(), PANEL);
        mark(SOFTMAX);
        for (Index r = 0; r < rows; ++r) {
            const Index seen = first_limit + r * limit_step - b * PANEL;
            Vec denominator = load(denominators + r * LANES);
            for (Index j = 0; j < PANEL; j += LANES) {
                Vec weight = capped(load(s.logits.get() + r * PANEL + j));
                if (seen < j + LANES)
                    for (Index i = 0; i < LANES; ++i) weight[i] = j + i < seen ? weight[i] : 0.0f;
                denominator += weight;
                narrow_store(s.weights.get() + r * PANEL + j, weight);
            }
            store(denominators + r * LANES, denominator);
        }
        mark(VALUES);
        accumulate(s.weights.get(), PANEL, rows, head_values + b * PANEL * value_width_, PANEL, value_width_, s.sums.get(),
                   value_width_);
    }
}

// After attention: output projection and residual, then the gated feed-forward network and its residual.
template <class T>
void Engine<T>::finish_layer(const Layer& layer, float* hidden, Index rows, Scratch& s) const {
    mark(OUTPUT);
    multiply(s.mixed.get(), queries_, rows, static_cast<const T*>(layer.output), queries_, out_columns_, s.wide.get(), out_columns_);
    mark(NORMS);
    add_normed(hidden, s.wide.get(), out_columns_, rows, layer.attention_post_norm);
    norm(hidden, rows, layer.ffn_norm, s.normed.get());
    const Index ffn = half_panels_ * 32;
    for (Index p = 0; p < half_panels_; ++p) {
        mark(GATE);
        product<T, 4, false>(s.normed.get(), padded_, rows, static_cast<const T*>(layer.gate_value) + p * padded_ * PANEL, padded_,
                           s.wide.get(), PANEL);
        mark(GELU);
        for (Index r = 0; r < rows; ++r)
            for (Index i = 0; i < 32; i += LANES) {
                const float* both = s.wide.get() + r * PANEL + i;
                narrow_store(s.activated.get() + r * ffn + p * 32 + i, gelu(load(both)) * load(both + 32));
            }
    }
    mark(FFN_OUTPUT);
    multiply(s.activated.get(), ffn, rows, static_cast<const T*>(layer.ffn_output), ffn, out_columns_, s.wide.get(), out_columns_);
    mark(NORMS);
    add_normed(hidden, s.wide.get(), out_columns_, rows, layer.ffn_post_norm);
}

// ---------------------------------------------------------------------------------------------------- tasks

template <class T>
void Engine<T>::context_task(const ContextJob& job, Work& work, Index index, Index layer, Scratch& s) {
    const Tile& tile = work.tiles[index];
    float* hidden = work.hidden.get() + tile.first * padded_;
    T* queries = work.queries.get() + tile.first * queries_;
    const Index elements = job.blocks * block_elements(), width = m_.head_width, kv = m_.kv_heads * width;
    T* layer_keys = static_cast<T*>(job.keys) + layer * m_.kv_heads * elements;
    if (layer == 0) {
        mark(TOKENS);
        context_tokens(job, tile, hidden, s);
    } else {
        mark(WAIT);
        const Index reads = m_.bidirectional ? Index(work.tiles.size()) : index + 1;
        for (Index t = 0; t < reads; ++t)
            for (long spins = 0; work.layers_written[t].load(std::memory_order_acquire) < layer; ++spins) pause_briefly(spins);
        const Index group = m_.query_heads / m_.kv_heads, total_rows = job.start + job.rows;
        const Index limit = m_.bidirectional ? total_rows : job.start + tile.first + 1;
        for (Index n = 0; n < m_.query_heads; ++n) {
            alignas(64) float denominators[MAX_TILE_ROWS * LANES] = {};
            std::fill_n(s.sums.get(), tile.rows * value_width_, 0.0f);
            const T* head_keys = layer_keys - (m_.kv_heads - n / group) * elements;  // of the layer before
            attend(queries + n * width, tile.rows, head_keys, job.blocks, limit, m_.bidirectional ? 0 : 1, s, denominators);
            for (Index r = 0; r < tile.rows; ++r) {
                const float factor = 1.0f / total(load(denominators + r * LANES));
                const float* sums = s.sums.get() + r * value_width_;
                T* mixed = s.mixed.get() + r * queries_ + n * width;
                each(
                    width, [&](Index i) { narrow_store(mixed + i, load(sums + i) * factor); },
                    [&](Index i) { mixed[i] = narrow<T>(sums[i] * factor); });
            }
        }
        finish_layer(m_.layer[layer - 1], hidden, tile.rows, s);
    }
    query_key_value(m_.layer[layer], hidden, tile.rows, job.positions + tile.first,
                    layer + 1 < m_.layers ? queries : nullptr, s);
    mark(STORE_KEYS);
    constexpr Index STEP = Step<T>::DEPTH;  // elements that lie together along the depth of a packed panel
    for (Index r = 0; r < tile.rows; ++r) {
        const Index row = job.start + tile.first + r, block = row / PANEL, place = row % PANEL;
        for (Index g = 0; g < m_.kv_heads; ++g) {
            T* keys = layer_keys + g * elements + block * PANEL * width;
            T* values = layer_keys + g * elements + job.blocks * PANEL * width + block * PANEL * value_width_;
            for (Index i = 0; i < width; ++i) {
                keys[(i / STEP * PANEL + place) * STEP + i % STEP] = s.keys.get()[r * kv + g * width + i];
                const Index chunk = i / PANEL * PANEL, chunk_width = std::min(PANEL, value_width_ - chunk);
                values[chunk * PANEL + (place / STEP * chunk_width + i - chunk) * STEP + place % STEP] =
                    s.values.get()[r * kv + g * width + i];
            }
        }
    }
    work.layers_written[index].store(layer + 1, std::memory_order_release);
}

template <class T>
void Engine<T>::candidate_tile(const CandidateJob& job, const Tile& tile, Scratch& s) {
    const Index elements = job.blocks * block_elements(), width = m_.head_width, kv = m_.kv_heads * width;
    const Index group = m_.query_heads / m_.kv_heads;
    const CappedExp capped(m_.attention_multiplier, m_.attention_cap);
    float* hidden = s.hidden.get();
    mark(TOKENS);
    candidate_tokens(job, tile, hidden, s);
    for (Index layer = 0; layer < m_.layers; ++layer) {
        query_key_value(m_.layer[layer], hidden, tile.rows, job.positions + tile.first, s.queries.get(), s);
        for (Index n = 0; n < m_.query_heads; ++n) {
            const Index g = n / group;
            const T* head_keys = static_cast<const T*>(job.keys) + (layer * m_.kv_heads + g) * elements;
            alignas(64) float denominators[MAX_TILE_ROWS * LANES] = {};
            std::fill_n(s.sums.get(), tile.rows * value_width_, 0.0f);
            attend(s.queries.get() + n * width, tile.rows, head_keys, job.blocks, job.keys_count, 0, s, denominators);
            mark(OWN_KEY);
            for (Index r = 0; r < tile.rows; ++r) {  // the candidate's own key, the diagonal of the mask
                const T *query = s.queries.get() + r * queries_ + n * width, *key = s.keys.get() + r * kv + g * width;
                const float own = capped(broadcast(dot(query, key, width)))[0], weight = widen(narrow<T>(own));
                const float factor = 1.0f / (total(load(denominators + r * LANES)) + own);
                const T* value = s.values.get() + r * kv + g * width;
                const float* sums = s.sums.get() + r * value_width_;
                T* mixed = s.mixed.get() + r * queries_ + n * width;
                each(
                    width,
                    [&](Index i) { narrow_store(mixed + i, fused(widen_load(value + i), broadcast(weight), load(sums + i)) * factor); },
                    [&](Index i) { mixed[i] = narrow<T>((sums[i] + weight * widen(value[i])) * factor); });
            }
        }
        finish_layer(m_.layer[layer], hidden, tile.rows, s);
    }
    mark(HEADS);
    norm(hidden, tile.rows, m_.final_norm, s.normed.get());
    for (Index i = 0; i < tile.rows * padded_; ++i) hidden[i] = widen(s.normed.get()[i]);
    multiply(static_cast<const float*>(hidden), padded_, tile.rows, m_.heads, padded_, head_columns_, s.wide.get(), head_columns_);
    for (Index r = 0; r < tile.rows; ++r) {
        float* outputs = s.wide.get() + r * head_columns_;
        const Index row = tile.first + r;
        std::copy_n(outputs, m_.actions, job.logits + row * m_.actions);
        for (Index i = 0; i < head_columns_; i += LANES)
            store(outputs + i, reciprocal(1.0f + exp2(load(outputs + i) * -LOG2_E)));
        std::copy_n(outputs, m_.actions, job.probabilities + row * m_.actions);
        std::copy_n(outputs + m_.actions, m_.continuous, job.continuous + row * m_.continuous);
    }
}

// Nearly equal tiles, at least `tiles_wanted` of them where there are rows enough.
template <class T>
std::vector<typename Engine<T>::Tile> Engine<T>::cut(Index job, Index rows, Index tiles_wanted) const {
    const Index tiles = std::max((rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS, std::min(tiles_wanted, (rows + ROWS - 1) / ROWS));
    std::vector<Tile> cuts;
    for (Index t = 0; t < tiles; ++t) cuts.push_back({job, rows * t / tiles, rows * (t + 1) / tiles - rows * t / tiles});
    return cuts;
}

template <class T>
void Engine<T>::forward(const ContextJob* contexts, Index n_contexts, const CandidateJob* candidates, Index n_candidates) {
    const Index threads = pool_.size();
    std::vector<Work> works(n_contexts);
    struct Step {
        Index job, tile, layer;
    };
    std::vector<Step> steps;
    for (Index c = 0; c < n_contexts; ++c) {
        Work& work = works[c];
        work.hidden = allocate<float>(contexts[c].rows * padded_);
        work.queries = allocate<T>(contexts[c].rows * queries_);
        work.tiles = cut(c, contexts[c].rows, (2 * threads + n_contexts - 1) / n_contexts);
        work.layers_written.reset(new std::atomic<Index>[work.tiles.size() + 1]());
    }
    for (Index layer = 0; layer < m_.layers; ++layer)
        for (Index c = 0; c < n_contexts; ++c)
            for (Index t = 0; t < Index(works[c].tiles.size()); ++t) steps.push_back({c, t, layer});
    std::vector<Tile> tiles;
    for (int waits = 0; waits < 2; ++waits)  // those whose context is at hand go first
        for (Index c = 0; c < n_candidates; ++c)
            if ((candidates[c].context >= 0) == bool(waits))
                for (const Tile& tile : cut(c, candidates[c].rows, (threads + n_candidates - 1) / n_candidates)) tiles.push_back(tile);
    const Index n_steps = Index(steps.size());
    pool_.run(n_steps + Index(tiles.size()), [&](long index, long thread) {
        if (index < n_steps) {
            const Step& step = steps[index];
            context_task(contexts[step.job], works[step.job], step.tile, step.layer, scratch_[thread]);
            return mark(OUTSIDE);
        }
        mark(WAIT);
        const Tile& tile = tiles[index - n_steps];
        const CandidateJob& job = candidates[tile.job];
        if (job.context >= 0)
            for (Index t = 0; t < Index(works[job.context].tiles.size()); ++t)
                for (long spins = 0; works[job.context].layers_written[t].load(std::memory_order_acquire) < m_.layers; ++spins)
                    pause_briefly(spins);
        candidate_tile(job, tile, scratch_[thread]);
        mark(OUTSIDE);
    });
}

template <class T>
double probe() {
    constexpr Index rows = 48, depth = 512, columns = 512;
    auto a = allocate<T>(rows * depth), b = allocate<T>(depth * columns);
    auto c = allocate<float>(rows * columns);
    std::fill_n(a.get(), rows * depth, narrow<T>(0.5f));
    std::fill_n(b.get(), depth * columns, narrow<T>(0.25f));
    double best = 1e9;
    for (int i = 0; i < 12; ++i) {
        const auto start = std::chrono::steady_clock::now();
        multiply(a.get(), depth, rows, b.get(), depth, columns, c.get(), columns);
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return best;
}

struct Handle {
    std::unique_ptr<Engine<float>> single;
    std::unique_ptr<Engine<bf16>> half;
};

}  // namespace ranker

extern "C" {

// Bits of the vectors the kernel was compiled for; below 512 it is right, but slower than torch's own products.
std::int64_t ranker_vector_bits() {
#if defined(__AVX512F__)
    return 512;
#else
    return 128;
#endif
}

// Whether bf16 products run on tile registers from now on. To be called before anything else.
std::int64_t ranker_enable_amx() { return ranker::enable_amx(); }

// Seconds that one product of typical shape takes on one core: the best of a few.
double ranker_probe(std::int64_t use_bf16) {
    return use_bf16 ? ranker::probe<ranker::bf16>() : ranker::probe<float>();
}

// Nanoseconds of all threads in each stage since the last call; only in a build with RANKER_STAGES.
void ranker_stages(std::int64_t* nanoseconds) {
#if defined(RANKER_STAGES)
    for (int i = 0; i < ranker::STAGES; ++i) nanoseconds[i] = ranker::stage_nanoseconds[i].exchange(0);
#else
    std::fill_n(nanoseconds, int(ranker::STAGES), 0);
#endif
}

void* ranker_create(const ranker::Model* model, std::int64_t threads, std::int64_t use_bf16) {
    auto* handle = new ranker::Handle;
    if (use_bf16)
        handle->half = std::make_unique<ranker::Engine<ranker::bf16>>(*model, threads);
    else
        handle->single = std::make_unique<ranker::Engine<float>>(*model, threads);
    return handle;
}

void ranker_destroy(void* handle) { delete static_cast<ranker::Handle*>(handle); }

void ranker_forward(void* handle, const ranker::ContextJob* contexts, std::int64_t n_contexts,
                    const ranker::CandidateJob* candidates, std::int64_t n_candidates) {
    auto* engines = static_cast<ranker::Handle*>(handle);
    if (engines->half)
        engines->half->forward(contexts, n_contexts, candidates, n_candidates);
    else
        engines->single->forward(contexts, n_contexts, candidates, n_candidates);
}
}
