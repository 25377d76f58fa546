"""Parts of the middlewares that keep rows aligned with tokens, RoutedExpertsMiddleware and IndexerTopkMiddleware.

Shapes, errors and statistics know the kinds; all else is about any of them.

keeper       the middlewares themselves, but for their options
decoding     base64 of int32 into the smallest type, piece by piece
replies      replies, whole and streamed: what was taken out goes to whom it belongs, the rest to the client
capture      an answer's rows held against its tokens and what is held already
shapes       the shape of the model's rows, and answers checked against it
store        rows under a byte budget
delivery     `POST /routed_experts`, `POST /indexer_topk`
"""
