/* MIX, RESCALE and SPARSIFY (mix.c). */
#ifndef MANYHANDS_MIX_H
#define MANYHANDS_MIX_H
#include "plan.h"

int check_mix(const Plan *plan, const Op *op);
void mix_row(const Plan *plan, const Op *op, int64_t row);
#endif
