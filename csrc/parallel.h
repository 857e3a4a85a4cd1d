// Shares work among the caller's threads: tasks 0 .. num_tasks - 1 start in order, each on the first free worker.
// Results must not depend on which worker runs a task.
#ifndef RINGTILE_PARALLEL_H
#define RINGTILE_PARALLEL_H

#include "ringtile.h"

#include <stdatomic.h>

typedef struct rt_task_queue {
    _Atomic int64_t next_task;
    int64_t num_tasks;
    void (*run_task)(void *ctx, int64_t task, int64_t worker);
    void *ctx;
} rt_task_queue;

static inline void rt_drain_queue(void *queue_ptr, int64_t worker) {
    rt_task_queue *queue = queue_ptr;
    for (;;) {
        const int64_t task = atomic_fetch_add_explicit(&queue->next_task, 1, memory_order_relaxed);
        if (task >= queue->num_tasks) return;
        queue->run_task(queue->ctx, task, worker);
    }
}

// How many workers there are: at least the calling thread.
static inline int64_t rt_num_workers(rt_parallel parallel) {
    return parallel.run == NULL || parallel.num_workers < 1 ? 1 : parallel.num_workers;
}

// Calls run_task(ctx, task, worker) for every task, with worker < parallel.num_workers, and returns when all are done.
static inline void rt_for_each(rt_parallel parallel, int64_t num_tasks,
                               void (*run_task)(void *ctx, int64_t task, int64_t worker), void *ctx) {
    rt_task_queue queue = {.num_tasks = num_tasks, .run_task = run_task, .ctx = ctx};
    const int64_t num_workers = num_tasks < parallel.num_workers ? num_tasks : parallel.num_workers;
    if (parallel.run == NULL || num_workers < 2)
        rt_drain_queue(&queue, 0);
    else
        parallel.run(parallel.pool, num_workers, rt_drain_queue, &queue);
}

// How many rows of row_len elements make a task worth waking a worker for.
static inline int64_t rt_rows_per_task(int64_t row_len) {
    enum { TASK_ELEMENTS = 16 * 1024 };
    return row_len < TASK_ELEMENTS ? TASK_ELEMENTS / (row_len > 0 ? row_len : 1) : 1;
}

static inline int64_t rt_num_tasks(int64_t num_rows, int64_t rows_per_task) {
    return num_rows / rows_per_task + (num_rows % rows_per_task > 0); // any number of rows
}

typedef struct rt_row_job {
    void (*run_rows)(const void *ctx, int64_t first, int64_t last);
    const void *ctx;
    int64_t num_rows, rows_per_task;
} rt_row_job;

static inline void rt_run_row_task(void *ctx, int64_t task, int64_t worker) {
    (void)worker;
    const rt_row_job *job = (const rt_row_job *)ctx;
    const int64_t first = task * job->rows_per_task, rest = job->num_rows - first;
    job->run_rows(job->ctx, first, first + (rest < job->rows_per_task ? rest : job->rows_per_task));
}

// Calls run_rows(ctx, first, last) for rows [first, last), which are all rows over all tasks.
static inline void rt_for_rows(rt_parallel parallel, int64_t num_rows, int64_t rows_per_task,
                               void (*run_rows)(const void *ctx, int64_t first, int64_t last), const void *ctx) {
    rt_row_job job = {run_rows, ctx, num_rows, rows_per_task};
    rt_for_each(parallel, rt_num_tasks(num_rows, rows_per_task), rt_run_row_task, &job);
}

#endif // RINGTILE_PARALLEL_H
