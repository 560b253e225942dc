/* A team of threads. The caller of a job waits only for members that have begun, so a job never waits for a thread to wake,
 * nor for one whose core is busy with something else.
 */
#define _GNU_SOURCE
#include "team.h"

#include <immintrin.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    HAND_BYTES = 1 << 20, /* of what comes next that a member fetches while it waits for work */
    WAKE_NS = 800000,     /* that a member waits awake: longer than what a layer computes between two products ... */
    REST_NS = 50000,      /* ... and after a step, when it may be the turn of another node on this machine */
    PAUSES = 64,          /* between two looks at the clock, when it gives way to others: about a microsecond */
    CLOSED = 1 << 30
};

struct Team {
    int size, sleeping, quits, rests;
    int gate;       /* members inside the job, and CLOSED when none may enter */
    unsigned round; /* raised for every job */
    Work *work;     /* the caller's: read inside the gate alone */
    Member *members;
    pthread_mutex_t lock;
    pthread_cond_t wake;
};

void *room_of(Work *work, Member *member, int64_t bytes)
{
    if (member->size >= bytes)
        return member->room;
    free(member->room);
    member->room = aligned_alloc(64, bytes);
    member->size = member->room ? bytes : 0;
    if (!member->room)
        __atomic_store_n(&work->failed, 1, __ATOMIC_RELAXED);
    return member->room;
}

/* Into a member's cache, until the next job is there. */
static void fetch(const Team *team, unsigned round, Bytes ahead)
{
    if (ahead.until - ahead.from > HAND_BYTES)
        ahead.until = ahead.from + HAND_BYTES;
    for (; ahead.from < ahead.until && __atomic_load_n(&team->round, __ATOMIC_RELAXED) == round; ahead.from += 4096)
        for (const char *at = ahead.from; at < ahead.from + 4096 && at < ahead.until; at += 64)
            _mm_prefetch(at, _MM_HINT_T1);
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Waits for a job after `round`: awake, then asleep. Its round; `quits` is set where there is none. */
static unsigned await_job(Team *team, unsigned round)
{
    int64_t began = now_ns();
    for (; now_ns() - began < (__atomic_load_n(&team->rests, __ATOMIC_RELAXED) ? REST_NS : WAKE_NS); sched_yield())
        for (int i = 0; i < PAUSES; i++) {
            if (__atomic_load_n(&team->round, __ATOMIC_ACQUIRE) != round)
                return team->round;
            _mm_pause();
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

int team_members(const Team *team, int64_t threads) { return (int)(threads < team->size ? threads : team->size); }

int team_run(Team *team, Work *work)
{
    for (int i = 0; i < work->members; i++) {
        team->members[i].next = range_start(work->tasks, work->members, i);
        team->members[i].end = range_start(work->tasks, work->members, i + 1);
    }
    if (work->members == 1) {
        work->share(work, team->members, 0);
        return work->failed;
    }
    team->work = work;
    __atomic_store_n(&team->rests, 0, __ATOMIC_RELAXED);
    __atomic_fetch_sub(&team->gate, CLOSED, __ATOMIC_ACQ_REL);
    give_job(team);
    work->share(work, team->members, 0);
    __atomic_fetch_add(&team->gate, CLOSED, __ATOMIC_ACQ_REL);
    for (int i = 0; __atomic_load_n(&team->gate, __ATOMIC_ACQUIRE) != CLOSED; i++)
        i < 1000 ? _mm_pause() : (void)sched_yield();
    return work->failed;
}

void tiles_team_rest(Team *team) { __atomic_store_n(&team->rests, 1, __ATOMIC_RELAXED); }

typedef struct {
    Team *team;
    int member;
} Place;

static void *serve(void *argument)
{
    Place place = *(Place *)argument;
    Team *team = place.team;
    free(argument);
    for (unsigned round = 0; round = await_job(team, round), !__atomic_load_n(&team->quits, __ATOMIC_ACQUIRE);) {
        Bytes ahead = {0};
        if (!(__atomic_fetch_add(&team->gate, 1, __ATOMIC_ACQ_REL) & CLOSED) && place.member < team->work->members) {
            Work *work = team->work;
            work->share(work, team->members, place.member);
            if (work->ahead)
                ahead = work->ahead(work, work->members, place.member);
        }
        __atomic_fetch_sub(&team->gate, 1, __ATOMIC_ACQ_REL);
        fetch(team, round, ahead);
    }
    return 0;
}

/* Ends the threads. Only while no job runs. */
void tiles_team_stop(Team *team)
{
    __atomic_store_n(&team->quits, 1, __ATOMIC_RELEASE);
    give_job(team);
    for (int i = 1; i < team->size; i++)
        pthread_join(team->members[i].thread, 0);
    for (int i = 0; i < team->size; i++)
        free(team->members[i].room);
    free(team->members);
    free(team);
}

/* `size` members, the caller included; fewer where the system gives no more threads. Null: no memory. */
Team *tiles_team_start(int64_t size)
{
    Team *team = calloc(1, sizeof *team);
    Member *members = aligned_alloc(64, size * sizeof *members);
    if (!team || !members) {
        free(team);
        free(members);
        return 0;
    }
    memset(members, 0, size * sizeof *members);
    team->members = members;
    team->gate = CLOSED;
    pthread_mutex_init(&team->lock, 0);
    pthread_cond_init(&team->wake, 0);
    for (team->size = 1; team->size < size; team->size++) {
        Place *place = malloc(sizeof *place);
        if (!place)
            break;
        *place = (Place){team, team->size};
        if (pthread_create(&members[team->size].thread, 0, serve, place)) {
            free(place);
            break;
        }
        pthread_setname_np(members[team->size].thread, "manyhands-tiles");
    }
    return team;
}
