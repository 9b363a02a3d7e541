// Users, history items and candidates as tokens: embedding rows gathered in place, projected, small features added.
#pragma once

#include "engine.h"

namespace ranker {

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
            const float fraction = std::min(std::max(job.dwell_seconds[row], 0.0f), 30.0f) / 30.0f;
            float hidden_dwell[DWELL_HIDDEN];
            for (Index i = 0; i < DWELL_HIDDEN; i += LANES) store(hidden_dwell + i, gelu(load(m_.dwell_input + i) * fraction));
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

}  // namespace ranker
