// Threads: those of the OpenMP library that torch has loaded, so that there is one pool and not two. Its entry point is
// called directly, since compilers' own pragmas would each bind to a library of their own.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

extern "C" void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags);

// body() in each of `threads` threads.
template <class Body>
void parallel(int64_t threads, Body body) {
    if (threads <= 1) return body();
    GOMP_parallel([](void* data) { (*static_cast<Body*>(data))(); }, &body, static_cast<unsigned>(threads), 0);
}

// task(i) for each i below `count`, each in a thread that is free, on the thread's own Worker after worker.begin(call).
template <class Worker, class Call, class Task>
void share_out(int64_t count, int64_t threads, const Call& call, Task task) {
    std::atomic<int64_t> next{0};
    parallel(std::min(count, threads), [&] {
        static thread_local Worker worker;
        worker.begin(call);
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(worker, i);
    });
}

// task(begin, end) for parts of 0 .. count, about one for each thread.
template <class Task>
void split(int64_t count, int64_t threads, Task task) {
    const int64_t part = (count + threads - 1) / std::max<int64_t>(threads, 1);
    std::atomic<int64_t> next{0};
    parallel(threads, [&] {
        for (int64_t begin; (begin = next.fetch_add(part, std::memory_order_relaxed)) < count;)
            task(begin, std::min(begin + part, count));
    });
}
