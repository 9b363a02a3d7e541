// Failures on demand, for tests (RANKER_TEST_HOOKS), and checks of what a caller hands over, for fuzzers (RANKER_CHECKS); else nothing.
#pragma once

// Ends the process where the caller has broken its word: whoever calls the kernel has checked all of it before.
#if defined(RANKER_CHECKS)
#include <cstdio>
#include <cstdlib>
#define RANKER_CHECK(kept) ((kept) ? void() : (std::fprintf(stderr, "%s:%d: not kept: %s\n", __FILE__, __LINE__, #kept), std::abort()))
#else
#define RANKER_CHECK(kept) void()
#endif

#if defined(RANKER_TEST_HOOKS)
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace ranker {

inline std::atomic<std::int64_t> steps_to_failure{-1};  // below 0: nothing fails

// Whether the allocation or thread that asks is the one that is to fail.
inline bool must_fail() { return steps_to_failure >= 0 && steps_to_failure-- == 0; }

}  // namespace ranker

void* operator new(std::size_t size) {
    if (ranker::must_fail()) throw std::bad_alloc();
    if (void* memory = std::malloc(size)) return memory;
    throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
#else
namespace ranker {
inline bool must_fail() { return false; }
}  // namespace ranker
#endif
