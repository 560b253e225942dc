/* Threads that share one piece of work at a time with the thread that calls, which is member 0 (team.c). */
#ifndef MANYHANDS_TEAM_H
#define MANYHANDS_TEAM_H
#include <pthread.h>
#include <stdint.h>

typedef struct {
    int64_t next, end; /* the tasks of its range that no thread has taken */
    void *room;        /* what it keeps between tasks, for whatever kernel runs */
    int64_t size;      /* bytes of it */
    pthread_t thread;
    char apart[24]; /* from the next member's cache line */
} Member;

typedef struct Team Team;
typedef struct Work Work;

typedef struct {
    const char *from, *until;
} Bytes;

/* A job begins with this. Tasks 0 .. tasks - 1 are independent; members share them in equal ranges. */
struct Work {
    void (*share)(Work *, Member *members, int self);     /* computes what take_task gives, until there is no more */
    Bytes (*ahead)(const Work *, int members, int self);  /* what a member may fetch into its cache afterwards; or null */
    int64_t tasks;
    int members, failed; /* failed: one of them got no memory */
};

/* A task that is left, of the member's own range first; -1: none. `turn` begins at 0 and is kept between calls. */
static inline int64_t take_task(const Work *work, Member *members, int self, int *turn)
{
    for (; *turn < work->members; ++*turn) {
        Member *owner = &members[(self + *turn) % work->members];
        int64_t task = __atomic_fetch_add(&owner->next, 1, __ATOMIC_RELAXED);
        if (task < owner->end)
            return task;
    }
    return -1;
}

/* Where the range of a member begins. */
static inline int64_t range_start(int64_t tasks, int members, int member) { return tasks * member / members; }

/* A member's room of `bytes` (a multiple of 64), aligned to a cache line; null: no memory, and the work has failed. */
void *room_of(Work *work, Member *member, int64_t bytes);

/* How many members a team gives where `threads` are asked for. */
int team_members(const Team *team, int64_t threads);

/* Runs the work on its first `work->members` members. 0, or 1 if it failed. Only one thread may call a team. */
int team_run(Team *team, Work *work);

/* The step is over: members need not stay awake for another job. Also after a job of one member. */
void tiles_team_rest(Team *team);
#endif
