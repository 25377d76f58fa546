"""Parts of the middlewares that keep rows aligned with tokens, RoutedExpertsMiddleware and IndexerTopkMiddleware.

`shapes`, `errors` and `statistics` distinguish the kinds of rows; all other modules serve any kind.

keeper       the base class of both middlewares
decoding     base64 of int32 to the smallest integer type, chunk by chunk
replies      relay replies, and take the rows out of them
capture      check an answer's rows against its tokens and against the rows in memory
shapes       the shape of the model's rows, and the check of answers against it
store        rows in memory under a byte budget
delivery     `POST /routed_experts`, `POST /indexer_topk`
"""
