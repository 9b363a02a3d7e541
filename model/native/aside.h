// A thread beside the caller that does one thing at a time and says on a pipe when it is done.
#pragma once

#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <unistd.h>

#include "hooks.h"

namespace ranker {

class Aside {
  public:
    using Task = std::function<std::int64_t()>;

    Aside() {
        if (pipe(ends_) != 0) throw std::system_error(errno, std::generic_category());
        for (int end : ends_) {
            fcntl(end, F_SETFD, FD_CLOEXEC);
            fcntl(end, F_SETFL, O_NONBLOCK);
        }
        try {
            if (must_fail()) throw std::bad_alloc();
            thread_ = std::thread([this] { work(); });
        } catch (...) {
            close_pipe();
            throw;
        }
    }
    ~Aside() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        wake_.notify_one();
        thread_.join();
        close_pipe();
    }
    Aside(const Aside&) = delete;
    Aside& operator=(const Aside&) = delete;

    // Readable when a task is done.
    int descriptor() const { return ends_[0]; }

    // There must not be another task. It must not throw.
    void begin(Task task) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            task_ = std::move(task);
        }
        wake_.notify_one();
    }

    // What the task that is done has returned.
    std::int64_t finish() {
        char byte;
        while (read(ends_[0], &byte, sizeof byte) < 0 && errno == EINTR) {
        }
        std::lock_guard<std::mutex> lock(mutex_);
        return result_;
    }

  private:
    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return stop_ || task_; });
            if (!task_) return;
            const Task task = std::move(task_);
            task_ = nullptr;
            lock.unlock();
            const std::int64_t result = task();
            lock.lock();
            result_ = result;
            const char byte = 1;
            while (write(ends_[1], &byte, sizeof byte) < 0 && errno == EINTR) {
            }
        }
    }
    void close_pipe() {
        for (int end : ends_) close(end);
    }

    int ends_[2];
    std::mutex mutex_;
    std::condition_variable wake_;
    bool stop_ = false;
    Task task_;
    std::int64_t result_ = 0;
    std::thread thread_;
};

}  // namespace ranker
