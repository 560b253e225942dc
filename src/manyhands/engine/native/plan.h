/* A plan: the operations of a span, with their weights, checked once; then run for rows of many sessions (run.c). */
#ifndef MANYHANDS_PLAN_H
#define MANYHANDS_PLAN_H
#include "kernels.h"
#include "team.h"

enum { MAX_REGISTERS = 64, MAX_NUMBERS = 13, MAX_REALS = 4, MAX_TENSORS = 7, MAX_WIDTH = 1 << 24, MAX_HEADS = 1 << 16,
       MAX_ROWS = 1 << 16, MAX_SEGMENTS = 1 << 12, MAX_POSITIONS = 1 << 28 };
#define MOST_BETA 1e15 /* of a scale by positions: its factors are finite */
#define MOST_POWER 4   /* likewise */
#define EXPORT __attribute__((visibility("default")))
/* Whether this CPU, and its system, can run a target: 0 scalar, 1 avx2, 2 avx512, 3 neon, 4 amx. */
EXPORT int mh_supports(int64_t target);
/* What a call answers: done, or why not (engine/library.py has the texts). */
enum { DONE, NO_MEMORY, BAD_KIND, BAD_REGISTER, BAD_SHAPE, BAD_TENSOR, BAD_SEGMENT, BAD_ROWS, BAD_POSITION, HAS_RUN };
/* As in engine/library.py. */
#define KIND_NAMES NORM, PRODUCT, ROTARY, ATTENTION, GATE, ADD, MULTIPLY, SOFTEN, COPY, ROUTE, EXPERTS, CONVOLVE, DECAY, DELTA, INDEX, SCALE, XIELU, COLLAPSE, SPREAD, COMPRESS, ATTEND_ENTRIES, MIX, RESCALE, SPARSIFY, NGRAMS, ADMIT, ATTEND_STREAMS, POSITION
enum { KIND_NAMES, KINDS };

/* What Python holds for as long as the plan lives. */
typedef struct {
    const void *data;
    int64_t bytes;
} Tensor;

/* One operation: its numbers, reals and tensors by place, in the order of their structs in plan.c. */
typedef struct {
    int64_t kind, numbers[MAX_NUMBERS];
    double reals[MAX_REALS];
    Tensor tensors[MAX_TENSORS];
    int64_t cache; /* attention, index keys, and what entries are made of: where the layer's begin in a block of a cache, in bytes; operations with states: in a block of states;
                      rotary: where its angles begin in those of a row */
    int64_t now;   /* operations with states, and rings: where theirs begins in the state behind the last position, in bytes */
    int64_t owns;  /* rotary: it is the first with these angles, and computes them */
} Op;
/* Whether experts have gates, or an activation alone. */
static inline int has_gates(const Op *op) { return op->tensors[0].data != 0; }

typedef struct {
    const Kernels *kernels;
    int64_t target, type, rounds, num_registers, widths[MAX_REGISTERS], offsets[MAX_REGISTERS], width; /* type: of rows; width: of all */
    int64_t out, out_type, positions, block_bytes, depth; /* depth: most steps of a product */
    int64_t state_bytes, now_bytes; /* of a block of states, and of the state behind the last position: all layers together */
    int64_t num_ops, room;
    Op *ops;
    int64_t turns;                        /* angles of a row */
    float *registers, *prepared, *angles; /* for `rows` rows; cosines and sines */
    int64_t rows;
    float *expert_rows; /* EXPERTS: what it keeps of every row and route */
    int64_t expert_floats, expert_room;
    char *index_room; /* INDEX: scores of some rows; attention: keys of the positions that some rows see */
    int64_t index_bytes;
    char *entry_room; /* INDEX of entries: where the panels of their keys lie, and those that are put together */
    int64_t entry_bytes;
} Plan;

/* Rows [row, row + count) of a step are the positions from `start` on of a session. Its cache has `num_blocks` blocks of 64 positions,
 * each of Plan.block_bytes: all layers, of a layer all key heads. Sessions may share blocks that none of them writes.
 * Its states (states.c): `now`, of Plan.now_bytes, and blocks of STATE_BLOCK positions, each of Plan.state_bytes, null where one is not
 * kept; of plans whose Plan.state_bytes is 0 `now` alone: rings (compressed.c). from: -1 where `now` is the state before `start`, else the first position of the block that gives it, which `start` lies in or
 * just behind. */
typedef struct {
    char *const *blocks;
    int64_t num_blocks, start, row, count;
    char *const *states;
    char *now;
    int64_t num_states, from;
} Segment;
/* The segment that has a row. */
static inline const Segment *segment_of(const Segment *s, int64_t row)
{
    while (row >= s->row + s->count)
        s++;
    return s;
}

static inline int is_count(int64_t n, int64_t most) { return n > 0 && n <= most; }
int64_t mh_packed_size(int64_t n, int64_t k);
int64_t mh_packed_bytes(int64_t type, int64_t n, int64_t k);
const Kernels *plan_kernels(int64_t target); /* null: this CPU cannot run it */
/* Numbers [at, at + count) of row `row` of a packed matrix of k columns -> out, as they are stored, of small weights as fp32; at: a multiple of 32. */
const void *unpack(int64_t type, const void *packed, int64_t k, int64_t row, int64_t at, int64_t count, void *out);
/* Bytes of a row of k numbers as a file stores it: of BF16, F16, F32, or in the blocks that W8 .. are made of (blocks.c), but those of grids
 * and of W4H; -1 for others, and where a row is no whole number of blocks. */
int64_t stored_row_bytes(int64_t type, int64_t k);
/* The numbers that a row of blocks stores, each in one rounding. */
void widen_blocks(int64_t type, const char *row, int64_t k, float *out);
/* At most 16 rows of k numbers as files store them (stored_row_bytes) -> fp32, one behind the other: what `unpack` and `widen` give of them in
 * a matrix that is kept so. F32: as they are stored; BF16: likewise, fp32 and blocks rounded; W8, W4: rounded to it, blocks as they are stored. */
void widen_rows(const Kernels *kernels, int64_t kept, const char *const *rows, const int64_t *types, int64_t count, int64_t k, float *out);
int64_t plan_expert_floats(const Plan *plan, const Op *op);
int experts_run(Plan *plan, Team *team, int64_t threads, const Op *op, int64_t rows);
enum { ID_DIGITS = 4 };
int64_t id_of(const Plan *plan, int64_t number, int64_t row, int64_t ids); /* of the `ids` that there are; 0 for what is none */
/* Rows of registers, and how many threads so many multiply-adds are worth (run.c). */
float *row_of(const Plan *plan, int64_t number, int64_t row);
int64_t members_for(int64_t threads, int64_t work);
int plan_run_chunk(Plan *plan, Team *team, int64_t threads, const Segment *segments, int64_t num_segments, int64_t rows);
/* exp(-rate softplus(x + bias)) of each column, or without rates softplus(x + bias), in double, rounded to fp32 (tables.c). */
void decay_row(const float *x, const double *rates, const float *bias, int64_t n, float *out);
/* log(1 + position / length, a whole number). Growth (SCALE): 1 + beta times that, (1 + position / length)^beta, or 1 + beta log(position /
 * length), 1 where that is less; in double, the factors rounded to fp32 (tables.c). */
double position_log(int64_t length, int64_t position);
enum { BY_WHOLE, BY_POWER, BY_LENGTHS, GROWTHS };
float position_scale(double beta, int64_t length, int64_t position, int64_t growth);
/* cos and sin of the fp32 product of position and frequency, in double times factor, rounded to fp32 (tables.c). */
void rope_angles(const float *frequencies, int64_t turns, double factor, int64_t position, float *cos, float *sin);
Kind plan_kind(const Plan *plan, const Op *op);
#endif
