// One decoder layer on a tile of rows: norms, projections, RoPE, attention over packed keys, the gated network.
#pragma once

#include "engine.h"

namespace ranker {

// 1 / sqrt(mean(x²) + ε); the padding beyond `width` is zero and adds nothing.
template <class T>
float Engine<T>::norm_factor(const float* row) const {
    const float squares = sum(
        padded_, [&](long i, Vec so_far) { return fma(load(row + i), load(row + i), so_far); }, [](long) { return 0.0f; });
    return 1.0f / std::sqrt(squares / float(m_.width) + m_.norm_epsilon);
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
    const Index skip = queries ? 0 : queries_ / PANEL * PANEL;  // whole panels of queries that are not needed
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
// logits, so a constant stands in for the running maximum, and what a key adds to the sums does not depend on the other keys.
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
        const MaskedReads masked((b + 1) * PANEL > first_limit);
        mark(LOGITS);
        multiply(queries, queries_, rows, head_keys + b * PANEL * m_.head_width, m_.head_width, PANEL, s.logits.get(), PANEL);
        mark(SOFTMAX);
        for (Index r = 0; r < rows; ++r) {
            const Index seen = first_limit + r * limit_step - b * PANEL;
            for (Index p = 0; p < GRAIN; p += LANES) {
                Vec denominator = load(denominators + r * GRAIN + p);
                for (Index j = p; j < PANEL; j += GRAIN) {
                    Vec weight = capped(load(s.logits.get() + r * PANEL + j));
                    if (seen < j + LANES)
                        for (Index i = 0; i < LANES; ++i) weight[i] = j + i < seen ? weight[i] : 0.0f;
                    denominator += weight;
                    narrow_store(s.weights.get() + r * PANEL + j, weight);
                }
                store(denominators + r * GRAIN + p, denominator);
            }
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
        multiply(s.normed.get(), padded_, rows, static_cast<const T*>(layer.gate_value) + p * padded_ * PANEL, padded_, PANEL,
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

}  // namespace ranker
