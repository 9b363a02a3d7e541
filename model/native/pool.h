// Threads that share a list of numbered tasks. Nothing here knows what a task does.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "hooks.h"

#if defined(__SANITIZE_THREAD__)
extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);
#endif

namespace ranker {

// For a wait that is nearly over: first politely to the other hardware thread, then to the operating system.
inline void pause_briefly(long spins) {
    if (spins > 2000) return std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Tells the thread sanitizer that rows which no query of a tile sees may be written while their block is read: what is read of
// them is multiplied, and then masked. A block that is seen whole is not among them.
struct MaskedReads {
#if defined(__SANITIZE_THREAD__)
    explicit MaskedReads(bool some) : some_(some) {
        if (some_) AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    }
    ~MaskedReads() {
        if (some_) AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    }
    const bool some_;
#else
    explicit MaskedReads(bool) {}
#endif
};

// Tasks are claimed in order, so a task may wait for any task of a lower number: a thread is already running that one.
//
// Tasks are numbered through, over all rounds: a round is the numbers `first` to `first + count - 1`, and no number is ever
// claimed twice. Only differences of numbers are compared, so 64 bits may even wrap.
class Pool {
  public:
    using Task = std::function<void(long index, long thread)>;
    using Number = std::uint64_t;

    // Takes what it gets: where the system refuses a thread, the pool works with those it has.
    explicit Pool(long threads) {
        threads_.reserve(threads);
        try {
            for (long i = 1; i < threads; ++i) {
                if (must_fail()) throw std::bad_alloc();
                threads_.emplace_back([this, i] { work(i); });
            }
        } catch (const std::exception&) {
        }
    }
    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        for (auto& thread : threads_) thread.join();
    }
    long size() const { return long(threads_.size()) + 1; }

    // Runs task(index, thread) for every index below count, the caller as thread 0. Returns when all are done, without
    // waiting for a thread that has not even woken up: it will find nothing to claim. With `alone`, no thread is woken up for it.
    // Tasks must not throw.
    void run(Number count, const Task& task, bool alone = false) {
        Round round;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            round = round_ = {&task, end_, count};
            end_ += count;
        }
        if (count > 1 && !alone) wake_.notify_all();
        drain(round, 0);
        for (long spins = 0; done_.load(std::memory_order_acquire) - round.first < count; ++spins) pause_briefly(spins);
    }

    // As if so many tasks had been run already; for tests, while nothing runs.
    void preset(Number tasks) {
        std::lock_guard<std::mutex> lock(mutex_);
        round_ = {};
        end_ = claimed_ = done_ = tasks;
    }

  private:
    struct Round {
        const Task* task = nullptr;
        Number first = 0, count = 0;
    };

    void drain(const Round& round, long thread) {
        for (Number next = claimed_.load(); next - round.first < round.count;) {
            if (!claimed_.compare_exchange_weak(next, next + 1)) continue;
            (*round.task)(long(next - round.first), thread);
            done_.fetch_add(1, std::memory_order_release);
            next = claimed_.load();
        }
    }
    void work(long thread) {
        for (Number seen = 0;;) {
            for (long spins = 0; spins < 2000 && end_.load(std::memory_order_relaxed) == seen; ++spins) pause_briefly(spins);
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return stop_ || end_ != seen; });
            if (stop_) return;
            seen = end_;
            const Round round = round_;
            lock.unlock();
            drain(round, thread);
        }
    }

    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_;
    Round round_;
    bool stop_ = false;
    std::atomic<Number> end_{0};      // one past the last task of the present round
    std::atomic<Number> claimed_{0};  // the next task to be claimed
    std::atomic<Number> done_{0};     // tasks that have been run
};

}  // namespace ranker
