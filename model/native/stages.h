// Where a forward's time goes. Compiled in with RANKER_STAGES for `python -m loadtest.profile`; otherwise it is nothing.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace ranker {

enum Stage { OUTSIDE, TOKENS, NORMS, QUERY_KEY_VALUE, ROPE, LOGITS, SOFTMAX, VALUES, OWN_KEY, OUTPUT, GATE, GELU, FFN_OUTPUT, HEADS, STORE_KEYS, WAIT, STAGES };

#if defined(RANKER_STAGES)
inline std::atomic<std::int64_t> stage_nanoseconds[STAGES];

// From here on, this thread's time belongs to `next`.
inline void mark(Stage next) {
    using Clock = std::chrono::steady_clock;
    thread_local Stage current = OUTSIDE;
    thread_local Clock::time_point since = Clock::now();
    const auto now = Clock::now();
    stage_nanoseconds[current] += std::chrono::duration_cast<std::chrono::nanoseconds>(now - since).count();
    current = next;
    since = now;
}
#else
inline void mark(Stage) {}
#endif

}  // namespace ranker
