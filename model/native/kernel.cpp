// The ranker on a CPU: contexts once, candidates against their keys and values, a tile of rows at a time through all of
// its layers. Exact in this sense: a row's numbers do not depend on its tile, its neighbours or the number of threads.
//
// A context is made of tasks (layer, tile): finish layer l-1 of the tile, then write its keys and values of layer l.
// The last layer stops there, unless somebody wants the rows' outputs: then one more task finishes it. A candidate tile is one task through all
// layers. Tasks wait for the tiles they read from by counters; the pool's claim order makes that free of deadlock.

#include <functional>

#include "aside.h"
#include "layer.h"
#include "tokens.h"

namespace ranker {

template <class T>
void Engine<T>::context_task(const ContextJob& job, Work& work, Index index, Index layer, Scratch& s) {
    const Tile& tile = work.tiles[index];
    float* hidden = work.hidden.get() + tile.first * padded_;
    T* queries = work.queries.get() + tile.first * queries_;
    const Index elements = job.blocks * block_elements(), width = m_.head_width, kv = m_.kv_heads * width;
    const Index layer_elements = m_.kv_heads * elements;
    T* layer_keys = static_cast<T*>(job.keys) + layer * layer_elements;
    if (layer == 0) {
        context_tokens(job, tile, hidden, s);
    } else {
        const Index reads = m_.bidirectional ? Index(work.tiles.size()) : index + 1;
        for (Index t = 0; t < reads; ++t)
            for (long spins = 0; work.layers_written[t].load(std::memory_order_acquire) < layer; ++spins) pause_briefly(spins);
        const Index group = m_.query_heads / m_.kv_heads, total_rows = job.start + job.rows;
        const Index limit = m_.bidirectional ? total_rows : job.start + tile.first + 1;
        const T* previous_keys = layer_keys - layer_elements;
        for (Index n = 0; n < m_.query_heads; ++n) {
            Gathered gathered;
            const T* head_keys = previous_keys + n / group * elements;
            attend(queries + n * width, tile.rows, head_keys, job.blocks, limit, m_.bidirectional ? 0 : 1, s, gathered);
            for (Index r = 0; r < tile.rows; ++r) {
                const float factor = 1.0f / total(gathered.denominators + r * GRAIN);
                const float* sums = s.sums.get() + r * value_width_;
                T* mixed = s.mixed.get() + r * queries_ + n * width;
                each(
                    width, [&](Index i) { narrow_store(mixed + i, load(sums + i) * factor); },
                    [&](Index i) { mixed[i] = narrow<T>(sums[i] * factor); });
            }
        }
        finish_layer(m_.layer[layer - 1], hidden, tile.rows, s);
    }
    if (layer == m_.layers) {
        for (Index r = 0; r < tile.rows; ++r) std::copy_n(hidden + r * padded_, m_.width, job.outputs + (tile.first + r) * m_.width);
        return;
    }
    query_key_value(m_.layer[layer], hidden, tile.rows, job.positions + tile.first,
                    layer + 1 < m_.layers || job.outputs ? queries : nullptr, s);
    constexpr Index STEP = Step<T>::DEPTH;  // elements that lie together along the depth of a packed panel
    for (Index r = 0; r < tile.rows; ++r) {
        const Index row = job.start + tile.first + r, block = row / PANEL, place = row % PANEL;
        for (Index g = 0; g < m_.kv_heads; ++g) {
            T* keys = layer_keys + g * elements + block * PANEL * width;
            T* values = layer_keys + g * elements + job.blocks * PANEL * width + block * PANEL * value_width_;
            for (Index i = 0; i < width; ++i) {
                keys[(place / STRIP * width + i / STEP * STEP) * STRIP + place % STRIP * STEP + i % STEP] =
                    s.keys.get()[r * kv + g * width + i];
                const Index strip = i / STRIP * STRIP, strip_width = std::min(STRIP, value_width_ - strip);
                values[strip * PANEL + (place / STEP * strip_width + i - strip) * STEP + place % STEP] =
                    s.values.get()[r * kv + g * width + i];
            }
        }
    }
    work.layers_written[index].store(layer + 1, std::memory_order_release);
}

// Whether every score is finite.
template <class T>
bool Engine<T>::candidate_tile(const CandidateJob& job, const Candidates& all, const Tile& tile, Scratch& s) {
    const Index first = job.first + tile.first;
    Index positions[MAX_TILE_ROWS];
    for (Index r = 0; r < tile.rows; ++r)
        positions[r] = m_.candidate_position + (job.first_slot + tile.first + r) % m_.candidate_slots;
    const Index elements = job.blocks * block_elements(), width = m_.head_width, kv = m_.kv_heads * width;
    const Index group = m_.query_heads / m_.kv_heads;
    const Weights weights(m_);
    float* hidden = s.hidden.get();
    candidate_tokens(all, first, tile.rows, hidden, s);
    for (Index layer = 0; layer < m_.layers; ++layer) {
        query_key_value(m_.layer[layer], hidden, tile.rows, positions, s.queries.get(), s);
        for (Index n = 0; n < m_.query_heads; ++n) {
            const Index g = n / group;
            const T* head_keys = static_cast<const T*>(job.keys) + (layer * m_.kv_heads + g) * elements;
            Gathered gathered;
            attend(s.queries.get() + n * width, tile.rows, head_keys, job.blocks, job.keys_count, 0, s, gathered);
            for (Index r = 0; r < tile.rows; ++r) {  // the candidate's own key, the diagonal of the mask
                const T *query = s.queries.get() + r * queries_ + n * width, *key = s.keys.get() + r * kv + g * width;
                float own, rest;
                weights.own(dot(query, key, width), gathered.peaks[r], own, rest);
                const float weight = widen(narrow<T>(own)), factor = 1.0f / (total(gathered.denominators + r * GRAIN) * rest + own);
                const T* value = s.values.get() + r * kv + g * width;
                const float* sums = s.sums.get() + r * value_width_;
                T* mixed = s.mixed.get() + r * queries_ + n * width;
                each(
                    width,
                    [&](Index i) { narrow_store(mixed + i, fma(widen_load(value + i), broadcast(weight), load(sums + i) * rest) * factor); },
                    [&](Index i) { mixed[i] = narrow<T>((sums[i] * rest + weight * widen(value[i])) * factor); });
            }
        }
        finish_layer(m_.layer[layer], hidden, tile.rows, s);
    }
    norm(hidden, tile.rows, m_.final_norm, s.normed.get());
    for (Index i = 0; i < tile.rows * padded_; ++i) hidden[i] = widen(s.normed.get()[i]);
    multiply(static_cast<const float*>(hidden), padded_, tile.rows, m_.heads, padded_, head_columns_, s.wide.get(), head_columns_);
    const auto are_finite = [](const float* values, Index n) { return std::all_of(values, values + n, [](float x) { return std::isfinite(x); }); };
    bool finite = true;
    for (Index r = 0; r < tile.rows; ++r) {
        float* outputs = s.wide.get() + r * head_columns_;
        const Index row = first + r;
        finite &= are_finite(outputs, m_.actions);
        std::copy_n(outputs, m_.actions, all.logits + row * m_.actions);
        for (Index i = 0; i < head_columns_; i += LANES)
            store(outputs + i, reciprocal(1.0f + exp2(load(outputs + i) * -LOG2_E)));
        finite &= are_finite(outputs + m_.actions, m_.continuous);
        std::copy_n(outputs, m_.actions, all.probabilities + row * m_.actions);
        std::copy_n(outputs + m_.actions, m_.continuous, all.continuous + row * m_.continuous);
    }
    return finite;
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
void Engine<T>::check_codes(const Index* codes) const {
    for (Index level = 0; level < m_.code_levels; ++level) RANKER_CHECK(codes[level] >= 0 && codes[level] <= m_.code_values);
}

// What model/native/engine.py and model/inputs.py promise of a job: in builds with RANKER_CHECKS alone.
template <class T>
void Engine<T>::check(const ContextJob& job) const {
    RANKER_CHECK(job.rows > 0 && job.start >= 0 && job.blocks >= 0 && job.start + job.rows <= job.blocks * PANEL);
    RANKER_CHECK(job.start + job.rows <= 1 + m_.history_length && (job.has_user == 0 || job.has_user == 1));
    for (Index r = 0; r < job.rows; ++r) {
        RANKER_CHECK(job.positions[r] >= 0 && job.positions[r] < m_.positions);
        if (r < job.has_user) continue;
        const Index item = job.positions[r] - job.first_position;
        RANKER_CHECK(item >= 0 && item < m_.history_length);
        RANKER_CHECK(job.surfaces[item] >= 0 && job.surfaces[item] < m_.surfaces);
        check_codes(job.codes + item * m_.code_levels);
    }
}

template <class T>
void Engine<T>::check(const CandidateJob& job, Index n_contexts, const Candidates& all) const {
    RANKER_CHECK(job.rows >= 0 && job.first >= 0 && job.first_slot >= 0 && job.context >= -1 && job.context < n_contexts);
    RANKER_CHECK(job.keys_count >= 0 && job.keys_count <= job.blocks * PANEL);
    for (Index r = job.first; r < job.first + job.rows; ++r) {
        RANKER_CHECK(all.surfaces[r] >= 0 && all.surfaces[r] < m_.surfaces);
        RANKER_CHECK(all.ages[r] >= 0 && all.ages[r] < m_.age_buckets);
        check_codes(all.codes + r * m_.code_levels);
    }
}

template <class T>
bool Engine<T>::forward(const ContextJob* contexts, Index n_contexts, const CandidateJob* jobs, Index n_jobs, const Candidates& all) {
#if defined(RANKER_CHECKS)
    std::for_each_n(contexts, n_contexts, [&](const ContextJob& job) { check(job); });
    std::for_each_n(jobs, n_jobs, [&](const CandidateJob& job) { check(job, n_contexts, all); });
#endif
    Index rows = 0;
    for (Index c = 0; c < n_contexts; ++c) rows += contexts[c].rows;
    for (Index c = 0; c < n_jobs; ++c) rows += jobs[c].rows;
    const bool is_small = rows * multiplications_of_a_row() < WORTH_A_THREAD;
    const Index threads = is_small ? 1 : pool_.size();
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
    for (Index layer = 0; layer <= m_.layers; ++layer)
        for (Index c = 0; c < n_contexts; ++c)
            for (Index t = 0; (layer < m_.layers || contexts[c].outputs) && t < Index(works[c].tiles.size()); ++t)
                steps.push_back({c, t, layer});
    std::vector<Tile> tiles;
    for (const bool context_is_made : {true, false})  // candidates that need not wait go first
        for (Index c = 0; c < n_jobs; ++c)
            if ((jobs[c].context < 0) == context_is_made)
                for (const Tile& tile : cut(c, jobs[c].rows, (threads + n_jobs - 1) / n_jobs)) tiles.push_back(tile);
    std::atomic<bool> finite{true};
    const Index n_steps = Index(steps.size());
    pool_.run(n_steps + Index(tiles.size()), [&](long index, long thread) {
        if (index < n_steps) {
            const Step& step = steps[index];
            return context_task(contexts[step.job], works[step.job], step.tile, step.layer, scratch_[thread]);
        }
        const Tile& tile = tiles[index - n_steps];
        const CandidateJob& job = jobs[tile.job];
        if (job.context >= 0)
            for (Index t = 0; t < Index(works[job.context].tiles.size()); ++t)
                for (long spins = 0; works[job.context].layers_written[t].load(std::memory_order_acquire) < m_.layers; ++spins)
                    pause_briefly(spins);
        if (!candidate_tile(job, all, tile, scratch_[thread])) finite = false;
    }, is_small);
    return finite;
}

struct Handle {
    std::unique_ptr<Engine<float>> single;
    std::unique_ptr<Engine<bf16>> half;
    std::unique_ptr<Aside> aside;  // last: its thread ends before the engines that it uses
    Pool& pool() { return half ? half->pool() : single->pool(); }
    bool forward(const ContextJob* contexts, Index n_contexts, const CandidateJob* jobs, Index n_jobs, const Candidates& all) {
        return half ? half->forward(contexts, n_contexts, jobs, n_jobs, all) : single->forward(contexts, n_contexts, jobs, n_jobs, all);
    }
};

// What every call returns that can fail. No exception leaves the library: a caller in C could not catch it.
enum Status : std::int64_t { DONE, OUT_OF_MEMORY, FAILED, NOT_FINITE };

template <class Body>
Status guarded(Body body) noexcept {
    try {
        body();
        return DONE;
    } catch (const std::bad_alloc&) {
        return OUT_OF_MEMORY;
    } catch (...) {
        return FAILED;
    }
}

template <class Body>
Status scored(Body body) noexcept {
    bool finite = false;
    const Status status = guarded([&] { finite = body(); });
    return status == DONE && !finite ? NOT_FINITE : status;
}

}  // namespace ranker

extern "C" {

// The vectors that the kernel was compiled for; "plain" is right, but slower than torch's own products.
const char* ranker_vectors() noexcept { return ranker::VECTORS; }

// The columns that lie together in a packed matrix.
std::int64_t ranker_strip() noexcept { return ranker::STRIP; }

// The members of every struct that crosses this border.
const ranker::Member* ranker_members() noexcept { return ranker::MEMBERS; }

// Whether bf16 products run on tile registers from now on. To be called before anything else.
std::int64_t ranker_enable_amx() noexcept { return ranker::enable_amx(); }

// Whether the processor multiplies pairs of bf16; without, bf16 is widened to float32 first, which takes longer than float32 itself.
std::int64_t ranker_multiplies_bf16() noexcept { return ranker::Step<ranker::bf16>::HALVES == 1; }

// Makes an engine with up to `threads` threads, the caller's included; `threads` becomes the number that the system gave.
std::int64_t ranker_create(const ranker::Model* model, std::int64_t use_bf16, std::int64_t* threads, void** made) noexcept {
    return ranker::guarded([&] {
        auto handle = std::make_unique<ranker::Handle>();
        if (use_bf16)
            handle->half = std::make_unique<ranker::Engine<ranker::bf16>>(*model, *threads);
        else
            handle->single = std::make_unique<ranker::Engine<float>>(*model, *threads);
        *threads = handle->pool().size();
        *made = handle.release();
    });
}

void ranker_destroy(void* handle) noexcept { delete static_cast<ranker::Handle*>(handle); }

// NOT_FINITE: all is computed, and some score is not a finite number.
std::int64_t ranker_forward(void* handle, const ranker::ContextJob* contexts, std::int64_t n_contexts,
                            const ranker::CandidateJob* jobs, std::int64_t n_jobs, const ranker::Id* post_ids,
                            const ranker::Id* author_ids, const std::int64_t* surfaces, const std::int64_t* ages,
                            const std::int64_t* codes, float* logits, float* probabilities, float* continuous) noexcept {
    const ranker::Candidates all{post_ids, author_ids, surfaces, ages, codes, logits, probabilities, continuous};
    auto* engines = static_cast<ranker::Handle*>(handle);
    return ranker::scored([&] { return engines->forward(contexts, n_contexts, jobs, n_jobs, all); });
}

// A thread for `ranker_begin`, and the descriptor that becomes readable when what it does is done.
std::int64_t ranker_open(void* handle, int* descriptor) noexcept {
    return ranker::guarded([&] {
        auto* engines = static_cast<ranker::Handle*>(handle);
        if (!engines->aside) engines->aside = std::make_unique<ranker::Aside>();
        *descriptor = engines->aside->descriptor();
    });
}

// As `ranker_forward`, but returns at once. What it points to must live until `ranker_finish`; one at a time.
std::int64_t ranker_begin(void* handle, const ranker::ContextJob* contexts, std::int64_t n_contexts,
                          const ranker::CandidateJob* jobs, std::int64_t n_jobs, const ranker::Id* post_ids,
                          const ranker::Id* author_ids, const std::int64_t* surfaces, const std::int64_t* ages,
                          const std::int64_t* codes, float* logits, float* probabilities, float* continuous) noexcept {
    const ranker::Candidates all{post_ids, author_ids, surfaces, ages, codes, logits, probabilities, continuous};
    return ranker::guarded([&] {
        auto* engines = static_cast<ranker::Handle*>(handle);
        engines->aside->begin([=] {
            return ranker::scored([&] { return engines->forward(contexts, n_contexts, jobs, n_jobs, all); });
        });
    });
}

// What `ranker_forward` returns, of the forward that has ended.
std::int64_t ranker_finish(void* handle) noexcept { return static_cast<ranker::Handle*>(handle)->aside->finish(); }

#if defined(RANKER_TEST_HOOKS)
// The rows of ids under every hash function of an entity.
void ranker_hash_rows(const ranker::Entity* entity, const ranker::Id* ids, std::int64_t n, std::int64_t* rows) noexcept {
    for (ranker::Index i = 0; i < n; ++i)
        for (ranker::Index j = 0; j < entity->hashes; ++j) rows[i * entity->hashes + j] = ranker::hash_row(*entity, ids[i], j);
}

// The allocation or thread after so many others fails; below 0, none does.
void ranker_fail_after(std::int64_t steps) noexcept { ranker::steps_to_failure = steps; }

// As if the engine's threads had run so many tasks already.
void ranker_preset_tasks(void* handle, std::uint64_t tasks) noexcept { static_cast<ranker::Handle*>(handle)->pool().preset(tasks); }
#endif
}
