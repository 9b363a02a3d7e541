// Users, history items and candidates as tokens: ids hashed, embedding rows gathered in place, projected, small features added.
#pragma once

#include "engine.h"

namespace ranker {

// The table's row under hash function j, as model/batch.py defines it: wrapping int64, a modulo that is never negative.
inline Index hash_row(const Entity& entity, Id id, Index j) {
    if (id == 0) return 0;
    const Index raw = Index(id * Id(entity.scales[j]) + Id(entity.biases[j])) % entity.modulus;
    return (raw < 0 ? raw + entity.modulus : raw) % (entity.vocab_size - 1) + 1;
}

template <class T>
void Engine<T>::gather(const Entity& entity, Id id, float* out) const {
    for (Index j = 0; j < entity.hashes; ++j, out += m_.width) {
        const Index row = hash_row(entity, id, j);
        if (row == 0) {
            std::fill_n(out, m_.width, 0.0f);
        } else if (m_.tables_bf16) {
            const bf16* values = static_cast<const bf16*>(entity.table) + row * m_.width;
            for (Index i = 0; i < m_.width; ++i) out[i] = widen(values[i]);
        } else {
            std::memcpy(out, static_cast<const float*>(entity.table) + row * m_.width, m_.width * sizeof(float));
        }
    }
}

// Tokens are made in fp32 and then take the model's dtype, as the published pipeline does it.
template <class T>
void round_rows(const float* in, Index stride, Index rows, Index width, float scale, float* out) {
    for (Index r = 0; r < rows; ++r)
        for (Index i = 0; i < width; ++i) out[r * width + i] = widen(narrow<T>(in[r * stride + i])) * scale;
}

template <class T>
void Engine<T>::add_codes(const Index* codes, const float* table, float* token) const {
    for (Index level = 0; level < m_.code_levels; ++level)
        if (codes[level] != 0) add(token, table + (level * m_.code_values + codes[level] - 1) * padded_);
}

template <class T>
void Engine<T>::context_tokens(const ContextJob& job, const Tile& tile, float* hidden, Scratch& s) const {
    const Index depth = (m_.post.hashes + m_.author.hashes) * m_.width;
    const Index user = job.has_user && tile.first == 0;
    float* wide = s.wide.get();
    const auto item_of = [&](Index r) { return job.positions[tile.first + r] - job.first_position; };
    for (Index r = user; r < tile.rows; ++r) {
        gather(m_.post, job.post_ids[item_of(r)], s.tokens.get() + r * depth);
        gather(m_.author, job.author_ids[item_of(r)], s.tokens.get() + r * depth + m_.post.hashes * m_.width);
    }
    multiply(s.tokens.get() + user * depth, depth, tile.rows - user, m_.history_projection, depth, out_columns_,
             wide + user * out_columns_, out_columns_);
    for (Index r = user; r < tile.rows; ++r) {
        const Index item = item_of(r);
        float* token = wide + r * out_columns_;
        const float* actions = job.actions + item * m_.actions;
        if (std::any_of(actions, actions + m_.actions, [](float a) { return a != 0; }))
            for (Index a = 0; a < m_.actions; ++a) add(token, m_.action_tokens + a * padded_, 2 * actions[a] - 1);
        add(token, m_.history_surfaces + job.surfaces[item] * padded_);
        add_codes(job.codes + item * m_.code_levels, m_.history_codes, token);
    }
    if (m_.dwell_input) {
        float* hidden_dwell = s.tokens.get();
        for (Index r = user; r < tile.rows; ++r, hidden_dwell += DWELL_HIDDEN) {
            const float fraction = std::min(std::max(job.dwell_seconds[item_of(r)], 0.0f), 30.0f) / 30.0f;
            for (Index i = 0; i < DWELL_HIDDEN; i += LANES) store(hidden_dwell + i, gelu(load(m_.dwell_input + i) * fraction));
        }
        accumulate(s.tokens.get(), DWELL_HIDDEN, tile.rows - user, m_.dwell_output, DWELL_HIDDEN, out_columns_,
                   wide + user * out_columns_, out_columns_);
    }
    if (user) {
        gather(m_.user, job.user_id, s.tokens.get());
        multiply(s.tokens.get(), 0, 1, m_.user_projection, m_.user.hashes * m_.width, out_columns_, wide, out_columns_);
    }
    round_rows<T>(wide, out_columns_, tile.rows, padded_, m_.input_scale, hidden);
}

template <class T>
void Engine<T>::candidate_tokens(const Candidates& all, Index first, Index rows, float* hidden, Scratch& s) const {
    const Index depth = (m_.post.hashes + m_.author.hashes) * m_.width;
    for (Index r = 0; r < rows; ++r) {
        gather(m_.post, all.post_ids[first + r], s.tokens.get() + r * depth);
        gather(m_.author, all.author_ids[first + r], s.tokens.get() + r * depth + m_.post.hashes * m_.width);
    }
    float* wide = s.wide.get();
    multiply(s.tokens.get(), depth, rows, m_.candidate_projection, depth, out_columns_, wide, out_columns_);
    for (Index r = 0; r < rows; ++r) {
        add(wide + r * out_columns_, m_.candidate_surfaces + all.surfaces[first + r] * padded_);
        if (m_.post_ages) add(wide + r * out_columns_, m_.post_ages + all.ages[first + r] * padded_);
        add_codes(all.codes + (first + r) * m_.code_levels, m_.candidate_codes, wide + r * out_columns_);
    }
    round_rows<T>(wide, out_columns_, rows, padded_, m_.input_scale, hidden);
}

}  // namespace ranker
