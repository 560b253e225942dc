/* Positions, or entries (compressed.c), that an indexer chooses. INDEX scores the cached index keys for every row and writes the positions of
 * the highest scores to a register; latent attention goes over their latents alone, gathered into blocks as a cache has them. A row that has
 * no more positions than are chosen sees all of them: nothing is scored for it, and its attention is that of any latent attention, which
 * gives the same bits. An index of blocks of positions chooses some for each key head, over whose blocks of the cache attention goes as if there
 * were no others. */
#include "index.h"
#include "compressed.h"

#include <stdlib.h>
#include <string.h>

enum {
    ROOM_BYTES = 1 << 24, /* of scores, or of gathered keys, that are held at once, though of one row at least */
    PANELS_OF_BLOCK = BLOCK / SIDE, /* of index keys */
    LEAST_BLOCKS = 16,    /* of index keys that a task scores, if it does not score all of a row */
    LEAST_GATHERED = 4,   /* blocks that a task gathers, if it does not gather all of a row */
    LEAST_HEADS = 8       /* of attention that a task keeps together */
};

/* A row that sees more positions, or entries, than are chosen: the last one that it sees; positions behind the last entry. */
typedef struct {
    const Segment *segment;
    int64_t row, position, behind;
} Late;

typedef struct {
    const Plan *plan;
    const Op *op;
    const Segment *segments;
    const Late *late;
    int64_t parts, per_task; /* tasks of a row, blocks or heads of a task */
    int64_t stride;          /* bytes of a row in the plan's room: of scores, or of a table of blocks, then the blocks */
    int64_t blocks;          /* INDEX: of keys that the last row sees */
    int64_t entries;         /* INDEX of entries: how many the last row sees, whose panels the room for that lists */
} Work;

/* Bytes of the addresses of all panels of so many entries. */
static int64_t panels_bytes(int64_t entries) { return table_bytes(ceil_div(entries, BLOCK) * PANELS_OF_BLOCK); }
static void *room_of(const Work *work, int64_t row) { return work->plan->index_room + row * work->stride; }

Kind index_kind(const Plan *plan, const Op *op)
{
    return (Kind){.groups = op->numbers[4], .width = op->numbers[5], .rounds = plan->rounds, .is_latent = 1};
}

/* Key heads for each of which blocks of the cache are chosen; 0: positions are. */
static int64_t choosing(const Op *op)
{
    const int64_t *n = op->numbers;
    return op->kind == INDEX ? (n[7] ? n[4] : 0) : n[8] || n[9] ? 0 : n[5];
}

/* Positions that are chosen at most. */
static int64_t most_chosen(const Plan *plan, const Op *op)
{
    int64_t width = plan->widths[op->numbers[op->kind == INDEX ? 3 : 11]];
    return choosing(op) ? width / choosing(op) * BLOCK : width;
}
int64_t attention_most(const Plan *plan, const Op *op) { return most_chosen(plan, op); }

/* Positions of an entry, or 0: an index is of positions. */
static int64_t rate_of(const Op *op) { return op->numbers[op->kind == INDEX ? 6 : 8]; }
static int64_t each_of(const Op *op) { return rate_of(op) ? rate_of(op) : 1; }
static int64_t seen_at(const Op *op, int64_t position) { return rate_of(op) ? (position + 1) / rate_of(op) : position + 1; }

static int64_t late_rows(const Op *op, const Segment *segments, int64_t num_segments, int64_t most, Late *out)
{
    int64_t found = 0;
    for (const Segment *s = segments; s < segments + num_segments; s++)
        for (int64_t i = 0; i < s->count; i++)
            if (seen_at(op, s->start + i) > most)
                out[found++] = (Late){s, s->row + i, seen_at(op, s->start + i) - 1, (s->start + i + 1) % each_of(op)};
    return found;
}

int64_t seeing_all(const Op *op, const Segment *segments, int64_t num_segments, int64_t most, Segment *out)
{
    most = (most + 1) * each_of(op) - 1;
    int64_t found = 0;
    for (const Segment *s = segments; s < segments + num_segments; s++)
        if (s->start < most) {
            out[found] = *s;
            out[found++].count = at_most(s->count, most - s->start);
        }
    return found;
}

/* Numbers 0, 1 .. below `count`, then -1. */
static void number_all(float *chosen, int64_t count, int64_t room)
{
    for (int64_t i = 0; i < room; i++)
        chosen[i] = i < count ? (float)i : -1;
}

/* A row's index key into the cache, or where an entry ends the entry's; of a row that sees all its positions, or blocks, their numbers. */
static void begin_task(const void *argument, int64_t row, void *scratch)
{
    const Work *work = argument;
    const Plan *plan = work->plan;
    const int64_t *n = work->op->numbers;
    const Segment *s = segment_of(work->segments, row);
    Kind kind = index_kind(plan, work->op);
    (void)scratch;
    int64_t position = s->start + row - s->row, most = most_chosen(plan, work->op), rate = n[6], seen = seen_at(work->op, position);
    int64_t each = rate ? entries_of_block(rate) : BLOCK, is_last = !rate || (position + 1) % rate == 0;
    if (is_last && each % SIDE == 0)
        plan->kernels->remember(&kind, row_of(plan, n[1], row), 0, s->blocks[position / BLOCK] + work->op->cache, (seen - 1) % each);
    else if (is_last)
        keep_row(plan, row_of(plan, n[1], row), n[5], entry_at(plan, s->blocks, work->op->cache, seen - 1, rate, n[5]));
    int64_t heads = choosing(work->op), listed = heads ? most / BLOCK : most;
    for (int64_t i = 0; seen <= most && i < (heads ? heads : 1); i++)
        number_all(row_of(plan, n[3], row) + i * listed, heads ? position / BLOCK + 1 : seen, listed);
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
    if (n[6])
        keys = (Keys){(char *const *)plan->entry_room, .has_panels = 1};
    int64_t heads = choosing(work->op);
    if (blocks > 0)
        plan->kernels->index(&kind, row_of(plan, n[0], late->row), heads ? 0 : row_of(plan, n[2], late->row), &keys, first, blocks,
                             (float *)room_of(work, task / work->parts) + first * BLOCK * (heads ? heads : 1), scratch);
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

/* Of a head the score of each block of n[7] positions: the highest of those up to `last`; the n[8] last blocks come before all others. */
static void score_blocks(const int64_t *n, const float *scores, int64_t last, float *best)
{
    int64_t whole = last / n[7];
    for (int64_t block = 0; block <= whole; block++) {
        best[block] = block > whole - n[8] ? __builtin_inff() : -__builtin_inff();
        for (int64_t i = block * n[7]; i <= last && i < (block + 1) * n[7]; i++) {
            float score = scores[i / BLOCK * n[4] * BLOCK + i % BLOCK];
            best[block] = score > best[block] ? score : best[block];
        }
    }
}

/* Of a late row and each head the blocks of the cache that lie in the chosen ones, in order, then -1. */
static void choose_blocks(const Work *work, const Late *late, const float *scores)
{
    const int64_t *n = work->op->numbers;
    int64_t each = most_chosen(work->plan, work->op) / BLOCK, last = late->position, parts = n[7] / BLOCK;
    float *best = (float *)scores + work->blocks * n[4] * BLOCK;
    for (int64_t head = 0; head < n[4]; head++) {
        float *chosen = row_of(work->plan, n[3], late->row) + head * each;
        score_blocks(n, scores + head * BLOCK, last, best);
        choose(best, last / n[7] + 1, each / parts, chosen);
        for (int64_t i = each - 1; i >= 0; i--) {
            int64_t at = (int64_t)chosen[i / parts] * parts + i % parts;
            chosen[i] = at <= last / BLOCK ? (float)at : -1;
        }
    }
}

static void choose_task(const void *argument, int64_t task, void *scratch)
{
    const Work *work = argument;
    const Late *late = work->late + task;
    (void)scratch;
    if (choosing(work->op))
        choose_blocks(work, late, room_of(work, task));
    else
        choose(room_of(work, task), late->position + 1, most_chosen(work->plan, work->op), row_of(work->plan, work->op->numbers[3], late->row));
}

static int has_room(char **room, int64_t *bytes, int64_t needed)
{
    if (*bytes >= needed)
        return 1;
    free(*room);
    *room = aligned_alloc(LINE, (size_t)needed);
    *bytes = *room ? needed : 0;
    return *room != 0;
}

int64_t rows_with_room(Plan *plan, int64_t stride, int64_t count)
{
    int64_t most = ROOM_BYTES / stride;
    most = most < 1 ? 1 : at_most(most, count);
    return has_room(&plan->index_room, &plan->index_bytes, most * stride) ? most : 0;
}

int64_t divide(int64_t *per_task, int64_t members, int64_t rows, int64_t whole, int64_t least)
{
    int64_t parts = members == 1 ? 1 : at_most(ceil_div(4 * members, rows), ceil_div(whole, least));
    *per_task = ceil_div(whole, parts);
    return ceil_div(whole, *per_task);
}

/* Scores of `rows` of the late rows, and what is chosen by them. */
static int score_and_choose(Team *team, int64_t threads, Work work, int64_t rows)
{
    const int64_t *n = work.op->numbers;
    int64_t blocks = work.blocks, members = members_for(threads, rows * blocks * BLOCK * n[4] * n[5]);
    Kind kind = index_kind(work.plan, work.op);
    work.parts = divide(&work.per_task, members, rows, blocks, LEAST_BLOCKS);
    int failed = team_run(team, members, score_task, &work, rows * work.parts, index_scratch(&kind));
    return failed ? failed : team_run(team, members_for(threads, rows * blocks * BLOCK * 8), choose_task, &work, rows, 0);
}

/* Where the panels of a block of index keys of entries lie: in the cache, or where they do not fill panels there, put together. */
static void entries_task(const void *argument, int64_t block, void *scratch)
{
    const Work *work = argument;
    const Plan *plan = work->plan;
    const int64_t *n = work->op->numbers;
    Kind kind = index_kind(plan, work->op);
    int64_t count = at_most(work->entries - block * BLOCK, BLOCK), panel = key_bytes(&kind) / PANELS_OF_BLOCK, each = entries_of_block(n[6]);
    char *rows[BLOCK], **table = (char **)plan->entry_room + block * PANELS_OF_BLOCK;
    char *gathered = plan->entry_room + panels_bytes(work->entries) + block * key_bytes(&kind);
    (void)scratch;
    for (int64_t i = 0; i < count && !fills_panels(n[6]); i++)
        rows[i] = entry_at(plan, work->segments->blocks, work->op->cache, block * BLOCK + i, n[6], n[5]);
    if (!fills_panels(n[6]))
        turn_rows(&kind, rows, count, gathered);
    for (int64_t p = 0; p < PANELS_OF_BLOCK; p++) {
        int64_t entry = block * BLOCK + at_most(p * SIDE, count - 1); /* behind the last panel that one again: nothing sees it */
        table[p] = fills_panels(n[6]) ? work->segments->blocks[entry / each] + work->op->cache + entry % each / SIDE * panel : gathered + p * panel;
    }
}

static int gather_entries(Plan *plan, Team *team, int64_t threads, const Work *work)
{
    Kind kind = index_kind(plan, work->op);
    int64_t blocks = ceil_div(work->entries, BLOCK), bytes = fills_panels(work->op->numbers[6]) ? 0 : blocks * key_bytes(&kind);
    if (!has_room(&plan->entry_room, &plan->entry_bytes, panels_bytes(work->entries) + bytes))
        return -1;
    return team_run(team, members_for(threads, bytes), entries_task, work, blocks, 0);
}

/* Late rows of all segments, of one alone where keys are those of entries. */
static int choose_late(Plan *plan, Team *team, int64_t threads, Work work, int64_t num_segments)
{
    Late late[CHUNK];
    int64_t count = late_rows(work.op, work.segments, num_segments, most_chosen(plan, work.op), late), last = 0;
    if (!count)
        return 0;
    for (int64_t i = 0; i < count; i++)
        last = late[i].position > last ? late[i].position : last;
    work.entries = last + 1;
    if (work.op->numbers[6] && gather_entries(plan, team, threads, &work))
        return -1;
    int64_t heads = choosing(work.op);
    work.blocks = last / BLOCK + 1;
    work.stride = ceil_div(work.blocks * (heads ? heads * BLOCK + 1 : BLOCK) * 4, LINE) * LINE;
    int64_t at_once = rows_with_room(plan, work.stride, count);
    int failed = at_once ? 0 : -1;
    for (int64_t first = 0; first < count && !failed; first += at_once) {
        work.late = late + first;
        failed = score_and_choose(team, threads, work, at_most(count - first, at_once));
    }
    return failed;
}

int index_run(Plan *plan, Team *team, int64_t threads, const Op *op, const Segment *segments, int64_t num_segments, int64_t rows)
{
    Work work = {.plan = plan, .op = op, .segments = segments};
    int failed = team_run(team, members_for(threads, rows * op->numbers[5] * 16), begin_task, &work, rows, 0);
    int64_t each = op->numbers[6] ? 1 : num_segments;
    for (int64_t i = 0; i < num_segments && !failed; i += each) {
        work.segments = segments + i;
        failed = choose_late(plan, team, threads, work, each);
    }
    return failed;
}

/* The position, or of an entry the first, that choice `i` of a late row names: of a number that is none the last one. */
static int64_t chosen_at(const Op *op, const Late *late, const float *chosen, int64_t i)
{
    float number = chosen[i];
    return (number >= 0 && number <= (float)late->position ? (int64_t)number : late->position) * each_of(op);
}

/* Of a late row: how many positions it sees, and which is number `i` of them. */
static int64_t num_seen(const Plan *plan, const Op *op, const Late *late) { return most_chosen(plan, op) * each_of(op) + late->behind; }

static int64_t seen_position(const Plan *plan, const Op *op, const Late *late, int64_t i)
{
    int64_t each = each_of(op), entries = most_chosen(plan, op);
    if (i >= entries * each)
        return (late->position + 1) * each + i - entries * each;
    return chosen_at(op, late, row_of(plan, op->numbers[11], late->row), i / each) + i % each;
}

/* A value is a column, as a product reads them. */
static void copy_value(const Kind *kind, const char *from, int64_t within, char *to, int64_t column)
{
    int64_t wide = panel_size(BLOCK / DEPTH), type = kind->rounds ? BF16 : F32, size = size_of_type(type);
    for (int64_t i = 0; i < kind->value_width; i++) {
        int64_t panel = i / SIDE * wide;
        memcpy(to + (panel + place_in_panel(type, column, i % SIDE)) * size, from + (panel + place_in_panel(type, within, i % SIDE)) * size, (size_t)size);
    }
}

/* Keys, and values, of `count` positions as those of positions 0, 1 .. of a block: each key is a column of a panel, a word in each of its
 * lines. */
static void gather(const Kind *kind, const Keys *cached, const int64_t *positions, int64_t count, char *block)
{
    int64_t panel = key_bytes(kind) / (BLOCK / SIDE);
    if (count < BLOCK) /* columns beyond the last: numbers that nothing sees */
        memset(block, 0, (size_t)block_bytes(kind));
    for (int64_t i = 0; i < count; i++) {
        int64_t at = positions[i];
        const char *held = cached->blocks[at / BLOCK] + cached->offset, *from = held + at % BLOCK / SIDE * panel + at % SIDE * 4;
        char *to = block + i / SIDE * panel + i % SIDE * 4;
        for (int64_t line = 0; line < panel; line += LINE)
            memcpy(to + line, from + line, 4);
        if (!kind->is_latent)
            copy_value(kind, held + key_bytes(kind), at % BLOCK, block + key_bytes(kind), i);
    }
}

/* Blocks that a late row sees at most, and the room of one of its key heads. */
static int64_t blocks_of(const Plan *plan, const Op *op) { return ceil_div(most_chosen(plan, op) * each_of(op) + each_of(op) - 1, BLOCK); }
static int64_t head_room(const Plan *plan, const Op *op)
{
    Kind kind = plan_kind(plan, op);
    return table_bytes(blocks_of(plan, op)) + blocks_of(plan, op) * block_bytes(&kind);
}

/* Some blocks of what a late row sees, of all key heads. */
static void gather_task(const void *argument, int64_t task, void *scratch)
{
    const Work *work = argument;
    const Plan *plan = work->plan;
    const Late *late = work->late + task / work->parts;
    Kind kind = plan_kind(plan, work->op);
    int64_t seen = num_seen(plan, work->op, late), blocks = ceil_div(seen, BLOCK), first = task % work->parts * work->per_task;
    (void)scratch;
    for (int64_t i = first; i < blocks && i < first + work->per_task; i++) {
        int64_t positions[BLOCK], count = at_most(seen - i * BLOCK, BLOCK);
        for (int64_t j = 0; j < count; j++)
            positions[j] = seen_position(plan, work->op, late, i * BLOCK + j);
        for (int64_t head = 0; head < work->op->numbers[5]; head++) {
            Keys cached = {late->segment->blocks, work->op->cache + head * block_bytes(&kind)};
            char *room = (char *)room_of(work, task / work->parts) + head * head_room(plan, work->op), **table = (char **)room;
            table[i] = room + table_bytes(blocks_of(plan, work->op)) + i * block_bytes(&kind);
            gather(&kind, &cached, positions, count, table[i]);
        }
    }
}

/* Some query heads of one key head of a late row. */
static void attend_task(const void *argument, int64_t task, void *scratch)
{
    const Work *work = argument;
    const Plan *plan = work->plan;
    const int64_t *n = work->op->numbers;
    const Late *late = work->late + task / work->parts;
    Kind kind = plan_kind(plan, work->op);
    int64_t of_head = work->parts / n[5], key_head = task % work->parts / of_head, group = task % of_head * work->per_task;
    int64_t row = late->row, head = key_head * kind.groups + group;
    Keys keys = {(char *const *)((char *)room_of(work, task / work->parts) + key_head * head_room(plan, work->op)), 0};
    const float *sinks = work->op->tensors[0].data;
    kind.groups = at_most(kind.groups - group, work->per_task);
    plan->kernels->attend(&kind, row_of(plan, n[0], row) + head * kind.width, 0, &keys, num_seen(plan, work->op, late) - 1, 1,
                          sinks ? sinks + head : 0, row_of(plan, n[3], row) + head * kind.value_width, 0, scratch);
}

/* The blocks that a register names [count], in a session; the last position that is seen in them, as if there were no others. */
static int64_t name_blocks(const float *numbers, int64_t count, const Late *late, int64_t offset, char **table)
{
    int64_t own = late->position / BLOCK, found = 0, last = -1;
    for (int64_t i = 0; i < count; i++)
        if (numbers[i] >= 0 && numbers[i] <= (float)own) {
            last = (int64_t)numbers[i];
            table[found++] = late->segment->blocks[last] + offset;
        }
    if (!found) /* none that is one */
        table[found++] = late->segment->blocks[last = own] + offset;
    return found * BLOCK - (last == own ? BLOCK - late->position % BLOCK : 1);
}

/* Some query heads of one key head of a late row. */
static void attend_blocks_task(const void *argument, int64_t task, void *scratch)
{
    const Work *work = argument;
    const Plan *plan = work->plan;
    const int64_t *n = work->op->numbers;
    const Late *late = work->late + task / work->parts / n[5];
    int64_t part = task % work->parts * work->per_task, head = task / work->parts % n[5];
    Kind kind = plan_kind(plan, work->op);
    int64_t query = head * kind.groups + part, each = most_chosen(plan, work->op) / BLOCK;
    char **table = (char **)((char *)scratch + attend_scratch(&kind));
    int64_t last = name_blocks(row_of(plan, n[11], late->row) + head * each, each, late, work->op->cache + head * block_bytes(&kind), table);
    const float *sinks = work->op->tensors[0].data;
    kind.groups = at_most(kind.groups - part, work->per_task);
    plan->kernels->attend(&kind, row_of(plan, n[0], late->row) + query * kind.width, 0, &(Keys){table, 0}, last, 1, sinks ? sinks + query : 0,
                          row_of(plan, n[3], late->row) + query * kind.value_width, 0, scratch);
}

static int attend_blocks(Plan *plan, Team *team, int64_t threads, const Op *op, const Segment *segments, int64_t num_segments)
{
    Late late[CHUNK];
    const int64_t *n = op->numbers;
    int64_t most = most_chosen(plan, op), count = late_rows(op, segments, num_segments, most, late), groups = n[4] / n[5];
    int64_t members = members_for(threads, count * most * n[4] * (n[6] + n[7]));
    Kind kind = plan_kind(plan, op);
    Work work = {.plan = plan, .op = op, .late = late};
    if (!count)
        return 0;
    work.parts = divide(&work.per_task, members, count * n[5], groups, LEAST_HEADS);
    return team_run(team, members, attend_blocks_task, &work, count * n[5] * work.parts, attend_scratch(&kind) + table_bytes(most / BLOCK));
}

int attend_chosen(Plan *plan, Team *team, int64_t threads, const Op *op, const Segment *segments, int64_t num_segments)
{
    Late late[CHUNK];
    const int64_t *n = op->numbers;
    if (choosing(op))
        return attend_blocks(plan, team, threads, op, segments, num_segments);
    int64_t most = most_chosen(plan, op), count = late_rows(op, segments, num_segments, most, late), blocks = blocks_of(plan, op);
    Kind kind = plan_kind(plan, op);
    Work work = {.plan = plan, .op = op, .stride = n[5] * head_room(plan, op)};
    int64_t at_once = count ? rows_with_room(plan, work.stride, count) : 1;
    int failed = at_once ? 0 : -1;
    for (int64_t first = 0; first < count && !failed; first += at_once) {
        int64_t rows = at_most(count - first, at_once), members = members_for(threads, rows * most * each_of(op) * n[4] * (n[6] + n[7]));
        work.late = late + first;
        work.parts = divide(&work.per_task, members, rows, blocks, LEAST_GATHERED);
        failed = team_run(team, members, gather_task, &work, rows * work.parts, 0);
        work.parts = n[5] * divide(&work.per_task, members, rows * n[5], n[4] / n[5], LEAST_HEADS);
        failed = failed ? failed : team_run(team, members, attend_task, &work, rows * work.parts, attend_scratch(&kind));
    }
    return failed;
}
