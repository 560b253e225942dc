/* Operations whose sessions keep a state (states.c). */
#ifndef MANYHANDS_STATES_H
#define MANYHANDS_STATES_H
#include "plan.h"

enum { MOST_TAPS = STATE_BLOCK };
/* Bytes of so many rows of a convolution as they are kept. */
int64_t convolution_bytes(const Plan *plan, const Op *op, int64_t rows);
/* Floats of the state of linear attention, and of what a block keeps of it. */
int64_t delta_floats(const Op *op);
int64_t delta_block_floats(const Op *op);
/* CONVOLVE or DELTA for all rows; 0, or -1 where there is no memory. */
int states_run(const Plan *plan, Team *team, int64_t threads, const Op *op, const Segment *segments, int64_t num_segments, int64_t rows);
#endif
