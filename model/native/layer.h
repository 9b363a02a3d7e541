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

// Adds rows to the residual stream, normed where the trunk is a sandwich.
template <class T>
void Engine<T>::add_normed(float* hidden, const float* rows, Index stride, Index count, const float* scale) const {
    for (Index r = 0; r < count; ++r, hidden += padded_, rows += stride) {
        if (scale == nullptr) {
            add(hidden, rows);
            continue;
        }
        const Vec factor = broadcast(norm_factor(rows));
        for (Index i = 0; i < padded_; i += LANES) store(hidden + i, load(hidden + i) + load(rows + i) * factor * load(scale + i));
    }
}

inline void scale(float* row, Index width, float factor) {
    for (Index i = 0; i < width; i += LANES) store(row + i, load(row + i) * factor);
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
    norm(hidden, rows, layer.attention_norm, s.normed.get());
    const Index skip = queries ? 0 : queries_ / PANEL * PANEL;  // whole panels of queries that are not needed
    const T* weights = static_cast<const T*>(layer.query_key_value) + skip * padded_;
    multiply(s.normed.get(), padded_, rows, weights, padded_, qkv_columns_ - skip, s.wide.get() + skip, qkv_columns_);
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

constexpr float BOUNDED_CAP = 40;  // exp of twice as much is a float still
constexpr float LARGE_CAP = 100;   // above it, rounding in cap · (1 − 2 / (1 + …)) would show in logits that are small beside the cap
constexpr float NO_PEAK = -1e30f;

// The attention weights of one model. Under a small cap they are `capped`, whatever the other keys. Otherwise the softmax
// needs the row's largest logit so far, its peak, and what was gathered shrinks where a key exceeds it: still operations on
// one row, in the order of its keys.
struct Weights {
    const CappedExp capped;
    const float multiplier, cap;
    explicit Weights(const Model& m) : capped(m.attention_multiplier, m.attention_cap), multiplier(m.attention_multiplier), cap(m.attention_cap) {}

    bool bounded() const { return cap > 0 && cap <= BOUNDED_CAP; }
    // The logits over ln 2, so that their exponentials are powers of two.
    Vec logits(Vec x) const {
        if (cap == 0) return x * (multiplier * LOG2_E);
        if (cap > LARGE_CAP) return under_large_cap(x * multiplier) * LOG2_E;
        return (cap * LOG2_E) * (1.0f - 2.0f * reciprocal(1.0f + exp2(x * capped.inner)));
    }

    // cap · tanh(x / cap), exact to float32's rounding far below the cap too: x itself times a series of tanh(y) / y, which is
    // within 1e-8 for |y| < 1/4.
    Vec under_large_cap(Vec x) const {
        const Vec y = x * (1 / cap), square = y * y;
        Vec ratio = broadcast(62.0f / 2835);
        ratio = fma(ratio, square, broadcast(-17.0f / 315));
        ratio = fma(ratio, square, broadcast(2.0f / 15));
        ratio = fma(ratio, square, broadcast(-1.0f / 3));
        ratio = fma(ratio, square, broadcast(1.0f));
        const Vec near_the_cap = cap * (1.0f - 2.0f * reciprocal(1.0f + exp2(y * (2 * LOG2_E))));
        return square < 0.0625f ? x * ratio : near_the_cap;
    }

    // A key of its own beside what a row has gathered: its weight, and the factor that shrinks the rest.
    void own(float product, float peak, float& weight, float& rest) const {
        rest = 1;
        if (bounded()) {
            weight = capped(broadcast(product))[0];
            return;
        }
        const float logit = logits(broadcast(product))[0], top = logit > peak ? logit : peak;
        weight = exp2(broadcast(logit - top))[0];
        rest = exp2(broadcast(peak - top))[0];
    }

    // One row's 64 products with a block's keys become weights, of which the first `seen` count.
    template <class T>
    void block(float* products, Index seen, float* denominators, T* out) const {
        for (Index p = 0; p < GRAIN; p += LANES) {
            Vec denominator = load(denominators + p);
            for (Index j = p; j < PANEL; j += GRAIN) {
                Vec weight = load(products + j);
                weight = bounded() ? capped(weight) : exp2(weight);
                if (seen < j + LANES) mask(weight, seen - j, 0.0f);
                denominator += weight;
                narrow_store(out + j, weight);
            }
            store(denominators + p, denominator);
        }
    }

    // Turns the products into logits below the peak, which they may raise; the factor that shrinks what was gathered before.
    float shift(float* products, Index seen, float& peak) const {
        Vec most = broadcast(peak);
        for (Index j = 0; j < PANEL; j += LANES) {
            Vec x = logits(load(products + j));
            if (seen < j + LANES) mask(x, seen - j, NO_PEAK);
            store(products + j, x);
            most = x > most ? x : most;
        }
        float top = peak;
        for (Index i = 0; i < LANES; ++i) top = most[i] > top ? most[i] : top;
        for (Index j = 0; j < PANEL; j += LANES) store(products + j, load(products + j) - top);
        const float factor = exp2(broadcast(peak - top))[0];
        peak = top;
        return factor;
    }

    static void mask(Vec& x, Index seen, float unseen) {
        for (Index i = 0; i < LANES; ++i) x[i] = i < seen ? x[i] : unseen;
    }
};

// Adds to s.sums [rows, value_width] and what is gathered what `rows` queries of one head see in the key blocks.
// Row r sees keys 0 … first_limit + r · limit_step − 1; a masked key adds exactly nothing.
template <class T>
void Engine<T>::attend(const T* queries, Index rows, const T* head_keys, Index blocks, Index first_limit, Index limit_step,
                       Scratch& s, Gathered& gathered) const {
    const Weights weights(m_);
    const T* head_values = head_keys + blocks * PANEL * m_.head_width;
    const Index last_limit = first_limit + (rows - 1) * limit_step;
    std::fill_n(s.sums.get(), rows * value_width_, 0.0f);
    std::fill_n(gathered.peaks, rows, NO_PEAK);
    for (Index b = 0; b * PANEL < last_limit; ++b) {
        const MaskedReads masked((b + 1) * PANEL > first_limit);
        multiply(queries, queries_, rows, head_keys + b * PANEL * m_.head_width, m_.head_width, PANEL, s.logits.get(), PANEL);
        for (Index r = 0; r < rows; ++r) {
            const Index seen = first_limit + r * limit_step - b * PANEL;
            float *products = s.logits.get() + r * PANEL, *denominators = gathered.denominators + r * GRAIN;
            if (!weights.bounded()) {
                const float factor = weights.shift(products, seen, gathered.peaks[r]);
                if (factor < 1) {
                    scale(denominators, GRAIN, factor);
                    scale(s.sums.get() + r * value_width_, value_width_, factor);
                }
            }
            weights.block(products, seen, denominators, s.weights.get() + r * PANEL);
        }
        accumulate(s.weights.get(), PANEL, rows, head_values + b * PANEL * value_width_, PANEL, value_width_, s.sums.get(),
                   value_width_);
    }
}

// After attention: output projection and residual, then the gated feed-forward network and its residual.
template <class T>
void Engine<T>::finish_layer(const Layer& layer, float* hidden, Index rows, Scratch& s) const {
    multiply(s.mixed.get(), queries_, rows, static_cast<const T*>(layer.output), queries_, out_columns_, s.wide.get(), out_columns_);
    add_normed(hidden, s.wide.get(), out_columns_, rows, layer.attention_post_norm);
    norm(hidden, rows, layer.ffn_norm, s.normed.get());
    const Index ffn = half_panels_ * 32;
    for (Index p = 0; p < half_panels_; ++p) {
        multiply(s.normed.get(), padded_, rows, static_cast<const T*>(layer.gate_value) + p * padded_ * PANEL, padded_, PANEL,
                 s.wide.get(), PANEL);
        for (Index r = 0; r < rows; ++r)
            for (Index i = 0; i < 32; i += LANES) {
                const float* both = s.wide.get() + r * PANEL + i;
                const Vec gate = m_.silu ? silu(load(both)) : gelu(load(both));
                narrow_store(s.activated.get() + r * ffn + p * 32 + i, gate * load(both + 32));
            }
    }
    multiply(s.activated.get(), ffn, rows, static_cast<const T*>(layer.ffn_output), ffn, out_columns_, s.wide.get(), out_columns_);
    add_normed(hidden, s.wide.get(), out_columns_, rows, layer.ffn_post_norm);
}

}  // namespace ranker
