/* Positions that an indexer chooses. INDEX scores the cached index keys for every row and writes the positions of the highest scores to a
 * register; latent attention goes over their latents alone, gathered into blocks as a cache has them. A row that has no more positions than
 * are chosen sees all of them: nothing is scored for it, and its attention is that of any latent attention, which gives the same bits. */
#include "index.h"

#include <stdlib.h>
#include <string.h>

enum {
    ROOM_BYTES = 1 << 24, /* of scores, or of gathered keys, that are held at once, though of one row at least */
    LEAST_BLOCKS = 16,    /* of index keys that a task scores, if it does not score all of a row */
    LEAST_GATHERED = 4,   /* blocks that a task gathers, if it does not gather all of a row */
    LEAST_HEADS = 8       /* of attention that a task keeps together */
};

/* A row that has more positions than are chosen. */
typedef struct {
    const Segment *segment;
    int64_t row, position;
} Late;

typedef struct {
    const Plan *plan;
    const Op *op;
    const Segment *segments;
    const Late *late;
    int64_t parts, per_task; /* tasks of a row, blocks or heads of a task */
    int64_t stride;          /* bytes of a row in the plan's room: of scores, or of a table of blocks, then the blocks */
} Work;

static void *room_of(const Work *work, int64_t row) { return work->plan->index_room + row * work->stride; }

Kind index_kind(const Plan *plan, const Op *op)
{
    return (Kind){.groups = op->numbers[4], .width = op->numbers[5], .rounds = plan->rounds, .is_latent = 1};
}

static int64_t most_chosen(const Plan *plan, const Op *op) { return plan->widths[op->numbers[op->kind == INDEX ? 3 : 11]]; }

static int64_t late_rows(const Segment *segments, int64_t num_segments, int64_t most, Late *out)
{
    int64_t found = 0;
    for (const Segment *s = segments; s < segments + num_segments; s++)
        for (int64_t i = s->start < most ? most - s->start : 0; i < s->count; i++)
            out[found++] = (Late){s, s->row + i, s->start + i};
    return found;
}

int64_t seeing_all(const Segment *segments, int64_t num_segments, int64_t most, Segment *out)
{
    int64_t found = 0;
    for (const Segment *s = segments; s < segments + num_segments; s++)
        if (s->start < most) {
            out[found] = *s;
            out[found++].count = at_most(s->count, most - s->start);
        }
    return found;
}

/* A row's index key into the cache; of a row that sees all its positions their numbers, then -1. */
static void begin_task(const void *argument, int64_t row, void *scratch)
{
    const Work *work = argument;
    const Plan *plan = work->plan;
    const int64_t *n = work->op->numbers;
    const Segment *s = work->segments;
    Kind kind = index_kind(plan, work->op);
    (void)scratch;
    while (row >= s->row + s->count)
        s++;
    int64_t position = s->start + row - s->row, most = most_chosen(plan, work->op);
    plan->kernels->remember(&kind, row_of(plan, n[1], row), 0, s->blocks[position / BLOCK] + work->op->cache, position % BLOCK);
    float *chosen = row_of(plan, n[3], row);
    for (int64_t i = 0; position < most && i < most; i++)
        chosen[i] = i <= position ? (float)i : -1;
}

static void score_task(const void *argument, int64_t task, void *scratch)
{
    const Work *work = argument;
    const Plan *plan = work->plan;
    const int64_t *n = work->op->numbers;
    const Late *late = work->late + task / work->parts;
    int64_t first = task % work->parts * work->per_task, blocks = at_most(late->position / BLOCK + 1 - first, work->per_task);
    Kind kind = index_kind(plan, work->op);
    Keys keys = {late->segment->blocks, work->op->cache};
    if (blocks > 0)
        plan->kernels->index(&kind, row_of(plan, n[0], late->row), row_of(plan, n[2], late->row), &keys, first, blocks,
                             (float *)room_of(work, task / work->parts) + first * BLOCK, scratch);
}

/* Numbers in the order of what they stand for; -0 is 0. */
static uint32_t ordered(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (bits == 0x80000000)
        bits = 0;
    return bits >> 31 ? ~bits : bits | 0x80000000;
}

/* The positions of the `count` highest of n scores, more than count, of equal ones the first; in order. */
static void choose(const float *scores, int64_t n, int64_t count, float *chosen)
{
    uint32_t least = 0, mask = 0; /* of the count-th highest the bits that are known */
    int64_t left = count;         /* to be found among the scores that begin with them */
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t counts[256] = {0}, digit = 255;
        for (int64_t i = 0; i < n; i++) {
            uint32_t bits = ordered(scores[i]);
            counts[bits >> shift & 255] += (bits & mask) == least;
        }
        for (; counts[digit] < left; digit--)
            left -= counts[digit];
        least |= (uint32_t)digit << shift, mask |= 255u << shift;
    }
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = ordered(scores[i]);
        if (bits > least || (bits == least && left-- > 0))
            *chosen++ = (float)i;
    }
}

static void choose_task(const void *argument, int64_t task, void *scratch)
{
    const Work *work = argument;
    const Late *late = work->late + task;
    (void)scratch;
    choose(room_of(work, task), late->position + 1, most_chosen(work->plan, work->op),
           row_of(work->plan, work->op->numbers[3], late->row));
}

static int has_room(Plan *plan, int64_t bytes)
{
    if (plan->index_bytes >= bytes)
        return 1;
    free(plan->index_room);
    plan->index_room = aligned_alloc(LINE, (size_t)bytes);
    plan->index_bytes = plan->index_room ? bytes : 0;
    return plan->index_room != 0;
}

/* Rows, of `count`, that have room at once; 0: no memory. */
static int64_t rows_at_once(Plan *plan, int64_t stride, int64_t count)
{
    int64_t most = ROOM_BYTES / stride;
    most = most < 1 ? 1 : at_most(most, count);
    return has_room(plan, most * stride) ? most : 0;
}

/* Divides `whole` (blocks, heads) of each of `rows` rows among tasks of `least` at least, if some members share a row. */
static void divide(Work *work, int64_t members, int64_t rows, int64_t whole, int64_t least)
{
    int64_t parts = members == 1 ? 1 : at_most(ceil_div(4 * members, rows), ceil_div(whole, least));
    work->per_task = ceil_div(whole, parts);
    work->parts = ceil_div(whole, work->per_task);
}

/* Scores of `rows` of the late rows, and what is chosen by them. */
static int score_and_choose(Team *team, int64_t threads, Work work, int64_t rows)
{
    const int64_t *n = work.op->numbers;
    int64_t blocks = work.stride / BLOCK / 4, members = members_for(threads, rows * blocks * BLOCK * n[4] * n[5]);
    Kind kind = index_kind(work.plan, work.op);
    divide(&work, members, rows, blocks, LEAST_BLOCKS);
    int failed = team_run(team, members, score_task, &work, rows * work.parts, index_scratch(&kind));
    return failed ? failed : team_run(team, members_for(threads, rows * blocks * BLOCK * 8), choose_task, &work, rows, 0);
}

int index_run(Plan *plan, Team *team, int64_t threads, const Op *op, const Segment *segments, int64_t num_segments, int64_t rows)
{
    Late late[CHUNK];
    Work work = {.plan = plan, .op = op, .segments = segments};
    int64_t count = late_rows(segments, num_segments, most_chosen(plan, op), late), last = 0;
    int failed = team_run(team, members_for(threads, rows * op->numbers[5] * 16), begin_task, &work, rows, 0);
    if (failed || !count)
        return failed;
    for (int64_t i = 0; i < count; i++)
        last = late[i].position > last ? late[i].position : last;
    work.stride = (last / BLOCK + 1) * BLOCK * 4;
    int64_t at_once = rows_at_once(plan, work.stride, count);
    if (!at_once)
        return -1;
    for (int64_t first = 0; first < count && !failed; first += at_once) {
        work.late = late + first;
        failed = score_and_choose(team, threads, work, at_most(count - first, at_once));
    }
    return failed;
}

/* Keys of `count` positions, of a number that is none up to `last` those of `last`, as the keys of positions 0, 1 .. of a block: each is a
 * column of a panel, a word in each of its lines. */
static void gather(const Kind *kind, const Keys *cached, const float *positions, int64_t count, int64_t last, char *block)
{
    int64_t panel = key_bytes(kind) / (BLOCK / SIDE);
    if (count < BLOCK) /* columns beyond the last: numbers that nothing sees */
        memset(block, 0, (size_t)key_bytes(kind));
    for (int64_t i = 0; i < count; i++) {
        int64_t at = positions[i] >= 0 && positions[i] <= (float)last ? (int64_t)positions[i] : last;
        const char *from = cached->blocks[at / BLOCK] + cached->offset + at % BLOCK / SIDE * panel + at % SIDE * 4;
        char *to = block + i / SIDE * panel + i % SIDE * 4;
        for (int64_t line = 0; line < panel; line += LINE)
            memcpy(to + line, from + line, 4);
    }
}

static int64_t table_bytes(int64_t blocks) { return ceil_div(blocks * (int64_t)sizeof(char *), LINE) * LINE; }

/* Some blocks of what a late row sees. */
static void gather_task(const void *argument, int64_t task, void *scratch)
{
    const Work *work = argument;
    const Late *late = work->late + task / work->parts;
    Kind kind = plan_kind(work->plan, work->op);
    Keys cached = {late->segment->blocks, work->op->cache};
    int64_t most = most_chosen(work->plan, work->op), blocks = ceil_div(most, BLOCK), first = task % work->parts * work->per_task;
    const float *positions = row_of(work->plan, work->op->numbers[11], late->row);
    char **table = room_of(work, task / work->parts), *gathered = (char *)table + table_bytes(blocks);
    (void)scratch;
    for (int64_t i = first; i < blocks && i < first + work->per_task; i++) {
        table[i] = gathered + i * key_bytes(&kind);
        gather(&kind, &cached, positions + i * BLOCK, at_most(most - i * BLOCK, BLOCK), late->position, table[i]);
    }
}

/* Some query heads of a late row. */
static void attend_task(const void *argument, int64_t task, void *scratch)
{
    const Work *work = argument;
    const Plan *plan = work->plan;
    const int64_t *n = work->op->numbers;
    int64_t row = work->late[task / work->parts].row, head = task % work->parts * work->per_task;
    Kind kind = plan_kind(plan, work->op);
    Keys keys = {room_of(work, task / work->parts), 0};
    const float *sinks = work->op->tensors[0].data;
    kind.groups = at_most(kind.groups - head, work->per_task);
    plan->kernels->attend(&kind, row_of(plan, n[0], row) + head * kind.width, 0, &keys, most_chosen(plan, work->op) - 1, 1,
                          sinks ? sinks + head : 0, row_of(plan, n[3], row) + head * kind.value_width, 0, scratch);
}

int attend_chosen(Plan *plan, Team *team, int64_t threads, const Op *op, const Segment *segments, int64_t num_segments)
{
    Late late[CHUNK];
    const int64_t *n = op->numbers;
    int64_t most = most_chosen(plan, op), count = late_rows(segments, num_segments, most, late), blocks = ceil_div(most, BLOCK);
    Kind kind = plan_kind(plan, op);
    Work work = {.plan = plan, .op = op, .stride = table_bytes(blocks) + blocks * key_bytes(&kind)};
    int64_t at_once = count ? rows_at_once(plan, work.stride, count) : 1;
    int failed = at_once ? 0 : -1;
    for (int64_t first = 0; first < count && !failed; first += at_once) {
        int64_t rows = at_most(count - first, at_once), members = members_for(threads, rows * most * n[4] * (n[6] + n[7]));
        work.late = late + first;
        divide(&work, members, rows, blocks, LEAST_GATHERED);
        failed = team_run(team, members, gather_task, &work, rows * work.parts, 0);
        divide(&work, members, rows, n[4], LEAST_HEADS);
        failed = failed ? failed : team_run(team, members, attend_task, &work, rows * work.parts, attend_scratch(&kind));
    }
    return failed;
}
