/* NGRAMS and ADMIT (ngrams.c), and sums of products. */
#ifndef MANYHANDS_NGRAMS_H
#define MANYHANDS_NGRAMS_H
#include "plan.h"

enum { MOST_TOKENS = 5, MOST_ADMITTING = 8 }; /* of an n-gram; streams */
int check_ngrams(const Plan *plan, const Op *op);
void ngrams_row(const Plan *plan, const Op *op, int64_t position, int64_t row);
int check_admit(const Plan *plan, const Op *op);
void admit_row(const Plan *plan, const Op *op, int64_t row);
float lane_products(const float *x, const float *y, int64_t n);
#endif
