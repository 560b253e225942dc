/* The caller of a job waits only for members that have begun, so a job never waits for a thread to wake, nor for one whose
 * core is busy with something else. Members wait 50 microseconds for the next job, then sleep. */
#define _GNU_SOURCE
#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#include "modes.h"

enum { AWAKE_NS = 50000, LOOKS = 64, CLOSED = 1 << 30 };

typedef struct {
    pthread_t thread;
    void *scratch;
    int64_t size;
    Team *team;
    int number;
} Member;

struct Team {
    int size, sleeping, quits;
    int gate;       /* members inside the job, and CLOSED when none may enter */
    unsigned round; /* raised for every job */
    Task task;      /* from here to `failed`: the job, read inside the gate alone */
    const void *job;
    int64_t tasks, next, scratch_bytes, members;
    int failed;
    Member *all;
    pthread_mutex_t lock;
    pthread_cond_t wake;
};

static void relax(void)
{
#if defined(__x86_64__)
    _mm_pause();
#else
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000 + now.tv_nsec;
}

static int has_room(Member *member, int64_t bytes)
{
    if (member->size >= bytes)
        return 1;
    free(member->scratch);
    member->scratch = aligned_alloc(64, (size_t)((bytes + 63) / 64 * 64));
    member->size = member->scratch ? bytes : 0;
    return member->scratch != 0;
}

static void work(Team *team, Member *member)
{
    if (!has_room(member, team->scratch_bytes)) { /* the others do the tasks; the caller is the last that must */
        if (member->number == 0)
            __atomic_store_n(&team->failed, 1, __ATOMIC_RELAXED);
        return;
    }
#ifdef SHARES_ALL /* tools/sanitized.py: each member has tasks of its own, so that tasks that race are never one thread's by chance */
    for (int64_t task = member->number; task < team->tasks; task += team->members)
        team->task(team->job, task, member->scratch);
    __atomic_fetch_add(&team->next, 1, __ATOMIC_RELAXED);
#else
    for (int64_t task; (task = __atomic_fetch_add(&team->next, 1, __ATOMIC_RELAXED)) < team->tasks;)
        team->task(team->job, task, member->scratch);
#endif
}

/* Waits for a job after `round`: awake, then asleep. Its round. */
static unsigned await_job(Team *team, unsigned round)
{
    for (int64_t began = now_ns(); now_ns() - began < AWAKE_NS; sched_yield())
        for (int i = 0; i < LOOKS; i++) {
            unsigned now = __atomic_load_n(&team->round, __ATOMIC_ACQUIRE);
            if (now != round)
                return now;
            relax();
        }
    pthread_mutex_lock(&team->lock);
    __atomic_fetch_add(&team->sleeping, 1, __ATOMIC_SEQ_CST); /* before the last look: give_job looks the other way round */
    while (__atomic_load_n(&team->round, __ATOMIC_SEQ_CST) == round)
        pthread_cond_wait(&team->wake, &team->lock);
    __atomic_fetch_sub(&team->sleeping, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&team->lock);
    return __atomic_load_n(&team->round, __ATOMIC_ACQUIRE);
}

static void give_job(Team *team)
{
    __atomic_fetch_add(&team->round, 1, __ATOMIC_SEQ_CST);
    if (!__atomic_load_n(&team->sleeping, __ATOMIC_SEQ_CST))
        return;
    pthread_mutex_lock(&team->lock);
    pthread_cond_broadcast(&team->wake);
    pthread_mutex_unlock(&team->lock);
}

int team_run(Team *team, int64_t members, Task task, const void *job, int64_t tasks, int64_t scratch_bytes)
{
    team->task = task, team->job = job, team->tasks = tasks, team->scratch_bytes = scratch_bytes, team->failed = 0;
    members = members < tasks ? members : tasks;
    team->members = members < team->size ? members : team->size;
    __atomic_store_n(&team->next, 0, __ATOMIC_RELAXED);
    if (team->members <= 1) {
        work(team, team->all);
        return team->failed ? -1 : 0;
    }
    __atomic_fetch_sub(&team->gate, CLOSED, __ATOMIC_ACQ_REL);
    give_job(team);
    work(team, team->all);
#ifdef SHARES_ALL
    while (__atomic_load_n(&team->next, __ATOMIC_RELAXED) < team->members)
        sched_yield();
#endif
    __atomic_fetch_add(&team->gate, CLOSED, __ATOMIC_ACQ_REL);
    for (int i = 0; __atomic_load_n(&team->gate, __ATOMIC_ACQUIRE) != CLOSED; i++)
        i < 1000 ? relax() : (void)sched_yield();
    return team->failed && team->next < team->tasks ? -1 : 0;
}

static void *serve(void *argument)
{
    Member *member = argument;
    Team *team = member->team;
    modes_enter();
    for (unsigned round = 0; round = await_job(team, round), !__atomic_load_n(&team->quits, __ATOMIC_ACQUIRE);) {
        if (!(__atomic_fetch_add(&team->gate, 1, __ATOMIC_ACQ_REL) & CLOSED) && member->number < team->members)
            work(team, member);
        __atomic_fetch_sub(&team->gate, 1, __ATOMIC_ACQ_REL);
    }
    return 0;
}

void team_stop(Team *team)
{
    __atomic_store_n(&team->quits, 1, __ATOMIC_RELEASE);
    give_job(team);
    for (int i = 1; i < team->size; i++)
        pthread_join(team->all[i].thread, 0);
    for (int i = 0; i < team->size; i++)
        free(team->all[i].scratch);
    pthread_cond_destroy(&team->wake);
    pthread_mutex_destroy(&team->lock);
    free(team->all);
    free(team);
}

Team *team_start(int64_t size)
{
    Team *team = calloc(1, sizeof *team);
    Member *all = calloc((size_t)size, sizeof *all);
    if (!team || !all) {
        free(team);
        free(all);
        return 0;
    }
    team->all = all;
    team->gate = CLOSED;
    pthread_mutex_init(&team->lock, 0);
    pthread_cond_init(&team->wake, 0);
    for (team->size = 1; team->size < size; team->size++) {
        all[team->size].team = team, all[team->size].number = team->size;
        if (pthread_create(&all[team->size].thread, 0, serve, all + team->size))
            break;
    }
    return team;
}
