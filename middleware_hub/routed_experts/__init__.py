"""Parts of RoutedExpertsMiddleware.

asking       the request, with rows asked for that nobody holds
extraction   expert ids taken out of an answer while it goes by
decoding     base64 of int32 into the smallest type, piece by piece
replies      answers, whole and streamed: what was extracted goes to whom it belongs, the rest to the client
capture      an answer's rows held against its tokens and the model's shape
model        the model's shape, and answers held against it
store        rows under a byte budget
delivery     `POST /routed_experts`
"""
