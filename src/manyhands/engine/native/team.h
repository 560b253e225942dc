/* A team of threads: one job at a time, cut into tasks that any member may take. */
#ifndef MANYHANDS_TEAM_H
#define MANYHANDS_TEAM_H
#include <stdint.h>

typedef struct Team Team;
/* Does task `task` of `job`; scratch: the member's own `scratch_bytes` (team_run). */
typedef void (*Task)(const void *job, int64_t task, void *scratch);

/* `size` members, the caller included; fewer where the system gives no more threads. Null: no memory. */
Team *team_start(int64_t size);
/* Ends the threads. Only while no job runs. */
void team_stop(Team *team);
/* Runs tasks 0 to tasks - 1 on at most `members` threads; 0, or -1 where there is no memory for scratch. */
int team_run(Team *team, int64_t members, Task task, const void *job, int64_t tasks, int64_t scratch_bytes);
#endif
