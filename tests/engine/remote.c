/* The engine in another process, also of another architecture (under qemu): calls and memory by stdin and stdout.
 * Commands, little-endian: A size -> address; W address size bytes; R address size -> bytes; C function, 12 integers, a double
 * -> result. aarch64 passes integers and doubles apart, so one signature does for all. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define FUNCTIONS(X) \
    X(mh_version) X(mh_supports) X(mh_calls) X(mh_packed_size) X(mh_packed_bytes) X(mh_pack) X(mh_round) X(mh_pack_blocks) X(mh_apply) X(mh_embed) X(mh_rope) X(mh_double) \
    X(mh_plan_new) X(mh_plan_add) X(mh_plan_block_bytes) X(mh_plan_state_bytes) X(mh_plan_now_bytes) X(mh_plan_run) X(mh_plan_release) X(mh_plan_free) X(mh_team_start) X(mh_team_stop)
#define DECLARE(name) extern int64_t name(void);
#define NAME(name) (void (*)(void))name,
FUNCTIONS(DECLARE)
static void (*const functions[])(void) = {FUNCTIONS(NAME)};
typedef int64_t (*Call)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                        double);

static void get(void *to, size_t size)
{
    if (fread(to, 1, size, stdin) != size)
        exit(0);
}

static void put(const void *from, size_t size)
{
    fwrite(from, 1, size, stdout);
    fflush(stdout);
}

int main(void)
{
    for (char command;;) {
        int64_t a[13];
        double real;
        get(&command, 1);
        if (command == 'C') {
            get(a, sizeof a);
            get(&real, 8);
            int64_t *i = a + 1, result = ((Call)functions[a[0]])(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], real);
            put(&result, 8);
            continue;
        }
        get(a, command == 'A' ? 8 : 16);
        if (command == 'A') {
            int64_t at = (int64_t)calloc((size_t)a[0] + 64, 1);
            put(&at, 8);
        } else if (command == 'W')
            get((void *)a[0], (size_t)a[1]);
        else
            put((void *)a[0], (size_t)a[1]);
    }
}
