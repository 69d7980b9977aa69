"""Operations on tensors: a contract per op in `ops`, implementations beside it; imports torch alone."""
