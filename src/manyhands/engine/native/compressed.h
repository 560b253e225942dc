/* Entries, each of which stands for some positions, and attention over positions and entries (compressed.c). */
#ifndef MANYHANDS_COMPRESSED_H
#define MANYHANDS_COMPRESSED_H
#include "plan.h"

enum { MOST_RATE = 512, MOST_BACK = 96 }; /* positions of an entry; before the last one that a step can always go back to (engine/states.py) */
/* Entries of a block of 64 positions have places there, in the block of their last position. */
static inline int is_rate(int64_t rate) { return is_count(rate, MOST_RATE) && (BLOCK % rate == 0 || rate % BLOCK == 0); }
static inline int64_t entries_of_block(int64_t rate) { return rate < BLOCK ? BLOCK / rate : 1; }
/* Whether those of a block fill panels, so that index keys lie there as they are read. */
static inline int fills_panels(int64_t rate) { return entries_of_block(rate) % SIDE == 0; }
/* Bytes of a row of `width` numbers as caches of entries hold it: in whole words. */
static inline int64_t kept_bytes(const Plan *plan, int64_t width) { return ceil_div(width * size_of_type(plan->type), 4) * 4; }
/* A row into a cache: rounded, the largest number for an infinity, zero for what is none. */
void keep_row(const Plan *plan, const float *x, int64_t width, char *to);
/* Where entry `number` of those that lie `offset` bytes behind the beginning of each block has its row. */
char *entry_at(const Plan *plan, char *const *blocks, int64_t offset, int64_t number, int64_t rate, int64_t width);
/* Kept rows -> the keys of a block as attention and index read them: row i is column i; `count` of them, zeros behind. */
void turn_rows(const Kind *kind, char *const *rows, int64_t count, char *block);
/* What operations keep of a block of 64 positions; and COMPRESS of the last positions, as many as ring_rows. */
int64_t compress_bytes(const Plan *plan, const Op *op);
int64_t entries_bytes(const Plan *plan, const Op *op);
int64_t ring_rows(const Op *op);
int64_t ring_bytes(const Plan *plan, const Op *op);
/* COMPRESS and ATTEND_ENTRIES for all rows; 0, or -1 where there is no memory. */
int compress_run(const Plan *plan, Team *team, int64_t threads, const Op *op, const Segment *segments, int64_t num_segments, int64_t rows);
int entries_run(Plan *plan, Team *team, int64_t threads, const Op *op, const Segment *segments, int64_t num_segments, int64_t rows);
/* COLLAPSE, SPREAD and ATTEND_STREAMS of one row (streams.c). */
enum { MOST_STREAMS = 8, MOST_ITERATIONS = 1000, MOST_ATTENDED = 64 };
int check_attend_streams(const Plan *plan, const Op *op);
void attend_streams_row(const Plan *plan, const Op *op, int64_t row);
void collapse_row(const Plan *plan, const Op *op, int64_t row);
void spread_row(const Plan *plan, const Op *op, int64_t row);
#endif
