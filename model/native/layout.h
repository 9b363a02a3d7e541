// What Python hands to the kernel: the C mirror of model/native/packing.py. Structs, and where their members are.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ranker {

using Index = std::int64_t;
using Id = std::uint64_t;

inline Index round_up(Index n, Index step) { return (n + step - 1) / step * step; }

// All widths are in elements; every matrix is packed in strips of columns, depth padded with zero rows.
struct Layer {
    const float *attention_norm, *attention_post_norm, *ffn_norm, *ffn_post_norm;  // [padded width]; null without a sandwich
    const void* query_key_value;                                                   // [padded width, (N + 2G) K]
    const void* output;                                                            // [N K, width]
    const void* gate_value;  // [padded width, F] twice, a panel holding 32 gate columns and their 32 value columns
    const void* ffn_output;  // [32 * panels of gate_value, width]
};

struct Entity {
    const void* table;  // [vocab_size, width] fp32 or bf16, never copied
    const Index *scales, *biases;  // [hashes]
    Index hashes, modulus, vocab_size;
};

struct Model {
    Index width, layers, query_heads, kv_heads, head_width, ffn_width, actions, continuous, tables_bf16, bidirectional, silu;
    Index surfaces, age_buckets, history_length, positions;  // rows of the tables below
    Index code_levels, code_values;                          // of a post's content codes; a level has codes 1 … code_values, and 0 is none
    Index candidate_position, candidate_slots;  // of slot s: candidate_position + s % candidate_slots
    float attention_multiplier, attention_cap, norm_epsilon, input_scale;  // cap 0: none
    const Layer* layer;
    Entity user, post, author;
    const float *user_projection, *history_projection, *candidate_projection;  // packed fp32; the hash embeddings' rows only
    const float *action_tokens, *history_surfaces, *candidate_surfaces;         // the other features, already projected
    const float *dwell_input, *dwell_output;  // [64]; packed fp32 [64, width], projected; null without the feature
    const float* post_ages;                   // [buckets, padded width], projected; null without the feature
    const float *history_codes, *candidate_codes;  // [levels * values, padded width], projected; null without the feature
    const float *final_norm, *heads;          // [padded width]; packed fp32 [padded width, A + Z]
    const float *cosines, *sines;             // [positions, head width]
};

// Rows of a context that are not in its keys yet. `keys` holds the rows before `start` already.
struct ContextJob {
    Index rows, start, blocks, has_user;  // blocks: capacity of `keys`; has_user: the first row is the user
    Index first_position;                 // of item 0
    Id user_id;
    void* keys;
    const Index* positions;           // per row; a row at position p is history item p - first_position, the user's is at 0
    const Id *post_ids, *author_ids;  // these and what follows: per item of the whole history
    const Index* surfaces;
    const float *actions, *dwell_seconds;
    const Index* codes;  // code_levels of each item
    float* outputs;  // [rows, width], what the trunk makes of each row; null where only keys are wanted
};

struct CandidateJob {
    Index rows, first, first_slot;     // first: the row of `Candidates` where the job begins; first_slot: its slot
    Index keys_count, blocks, context;  // context: index of the job that makes the keys, or -1
    const void* keys;
};

// The candidates of all jobs of a forward, and where their scores go.
struct Candidates {
    const Id *post_ids, *author_ids;
    const Index *surfaces, *ages, *codes;
    float *logits, *probabilities, *continuous;
};

// Every member by name, for Python to compare with its own before the first call. A null name ends the list.
struct Member {
    const char* name;
    Index offset, bytes;
};
#define WHOLE(type) {#type, 0, sizeof(type)}
#define AT(type, member) {#type "." #member, offsetof(type, member), sizeof(type::member)}
constexpr Member MEMBERS[] = {
    WHOLE(Layer), AT(Layer, attention_norm), AT(Layer, attention_post_norm), AT(Layer, ffn_norm), AT(Layer, ffn_post_norm),
    AT(Layer, query_key_value), AT(Layer, output), AT(Layer, gate_value), AT(Layer, ffn_output),
    WHOLE(Entity), AT(Entity, table), AT(Entity, scales), AT(Entity, biases), AT(Entity, hashes), AT(Entity, modulus),
    AT(Entity, vocab_size),
    WHOLE(Model), AT(Model, width), AT(Model, layers), AT(Model, query_heads), AT(Model, kv_heads), AT(Model, head_width),
    AT(Model, ffn_width), AT(Model, actions), AT(Model, continuous), AT(Model, tables_bf16), AT(Model, bidirectional), AT(Model, silu),
    AT(Model, surfaces), AT(Model, age_buckets), AT(Model, history_length), AT(Model, positions), AT(Model, code_levels),
    AT(Model, code_values),
    AT(Model, candidate_position), AT(Model, candidate_slots), AT(Model, attention_multiplier), AT(Model, attention_cap), AT(Model, norm_epsilon), AT(Model, input_scale), AT(Model, layer), AT(Model, user),
    AT(Model, post), AT(Model, author), AT(Model, user_projection), AT(Model, history_projection),
    AT(Model, candidate_projection), AT(Model, action_tokens), AT(Model, history_surfaces), AT(Model, candidate_surfaces),
    AT(Model, dwell_input), AT(Model, dwell_output), AT(Model, post_ages), AT(Model, history_codes), AT(Model, candidate_codes), AT(Model, final_norm), AT(Model, heads),
    AT(Model, cosines), AT(Model, sines),
    WHOLE(ContextJob), AT(ContextJob, rows), AT(ContextJob, start), AT(ContextJob, blocks), AT(ContextJob, has_user),
    AT(ContextJob, first_position), AT(ContextJob, user_id), AT(ContextJob, keys), AT(ContextJob, positions),
    AT(ContextJob, post_ids), AT(ContextJob, author_ids), AT(ContextJob, surfaces), AT(ContextJob, actions),
    AT(ContextJob, dwell_seconds), AT(ContextJob, codes), AT(ContextJob, outputs),
    WHOLE(CandidateJob), AT(CandidateJob, rows), AT(CandidateJob, first), AT(CandidateJob, first_slot),
    AT(CandidateJob, keys_count), AT(CandidateJob, blocks), AT(CandidateJob, context), AT(CandidateJob, keys),
    {nullptr, 0, 0},
};
#undef WHOLE
#undef AT

}  // namespace ranker
