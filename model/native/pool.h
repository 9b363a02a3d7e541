// Threads that share a list of numbered tasks. Nothing here knows what a task does.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace ranker {

// For a wait that is nearly over: first politely to the other hardware thread, then to the operating system.
inline void pause_briefly(long spins) {
    if (spins > 2000) return std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Tasks are claimed in order, so a task may wait for any task of a lower number: somebody is already running that one.
class Pool {
  public:
    using Task = std::function<void(long index, long thread)>;

    explicit Pool(long threads) {
        for (long i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
    }
    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
    }
    long size() const { return long(workers_.size()) + 1; }

    // Runs task(index, thread) for every index below count, the caller as thread 0. Returns when all are done, without
    // waiting for a worker that has not even woken up: it will find the round over.
    void run(long count, const Task& task) {
        std::uint64_t round;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            task_ = &task;
            count_ = count;
            round = ++round_;
            done_.store(0);
            claim_.store(round << 32);
        }
        if (count > 1) wake_.notify_all();
        drain(round, count, task, 0);
        for (long spins = 0; done_.load(std::memory_order_acquire) < count; ++spins) pause_briefly(spins);
    }

  private:
    // Claims tasks of this round only: the round stands in the upper half of the counter.
    void drain(std::uint64_t round, long count, const Task& task, long thread) {
        for (std::uint64_t claimed = claim_.load();;) {
            const long index = long(claimed & 0xffffffffu);
            if (claimed >> 32 != round || index >= count) return;
            if (!claim_.compare_exchange_weak(claimed, claimed + 1)) continue;
            task(index, thread);
            done_.fetch_add(1, std::memory_order_release);
            claimed = claim_.load();
        }
    }
    void work(long thread) {
        for (std::uint64_t seen = 0;;) {
            for (long spins = 0; spins < 2000 && (claim_.load(std::memory_order_relaxed) >> 32) == seen; ++spins)
                pause_briefly(spins);
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return stop_ || round_ != seen; });
            if (stop_) return;
            seen = round_;
            const Task* task = task_;
            const long count = count_;
            lock.unlock();
            drain(seen, count, *task, thread);
        }
    }

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    const Task* task_ = nullptr;
    long count_ = 0;
    std::uint64_t round_ = 0;
    bool stop_ = false;
    std::atomic<std::uint64_t> claim_{0};
    std::atomic<long> done_{0};
};

}  // namespace ranker
