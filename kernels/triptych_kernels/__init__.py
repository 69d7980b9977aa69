"""Operations on tensors: a contract for each op in `ops`, its implementations in the packages beside it."""
