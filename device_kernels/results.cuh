// A step's record as commit leaves it in device memory, and as publish_results copies it into the mailbox: int32 words.
//
// Header, then [ROW_WORDS, rows], then, with kept token ids, int64 [rows, tokens_per_row]. zos/mailbox.py reads the same layout.
#pragma once
#include "ring.cuh"

namespace zos {

enum HeaderWord {
    STEP = 0,  // int64: number of the record, from 1
    ROWS = 2,
    PREFILL = 3,         // 1: of a prefill batch
    BATCH_VERSION = 4,   // of the slot's batch after the step: how often it has changed
    BATCHES_REFUSED = 5, // set_batch edits refused so far
    READY_TAKEN = 6,     // entries of the ready queue taken so far
    ERRORS = 7,          // rows of this step that are in error
    DEFERRED = 8,        // rows of this step that did not fit
    STALE = 9,           // results of this step that came for a former life of their state
    DUPLICATE = 10,      // results of this step that had counted before
    TOKENS_PER_ROW = 11, // kept token ids of a row, 0: none
    HEADER_WORDS = 16,
};

// Arrays of a record, each [rows]: state id of the ticket (-1: none), its generation, q_start after the step, tokens kept, flags,
// state id that stands in the batch row after the step.
enum RowWord { STATE_ID = 0, GENERATION = 1, Q_START = 2, KEPT = 3, FLAGS = 4, NEXT_STATE_ID = 5, ROW_WORDS = 6 };

enum RowFlag { IS_FINISHED = 1, IS_ERROR = 2, IS_STALE = 4, IS_DUPLICATE = 8, IS_DEFERRED = 16, IS_REFILLED = 32 };

ZOS_HD long long record_words(int rows, int tokens_per_row) {
    return HEADER_WORDS + static_cast<long long>(rows) * (ROW_WORDS + 2 * tokens_per_row);
}

}  // namespace zos
