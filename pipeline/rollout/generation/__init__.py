"""Generation engines behind one interface.

cuda_graphs   decoding steps replayed from a CUDA graph
engines       an engine by its name
hf_generate   adapter for a `generate` method
interface     the interface of an engine
kv_cache      a cache of keys and values of fixed room
stops         the end of a response
transformers  the engine over a transformers model
"""
