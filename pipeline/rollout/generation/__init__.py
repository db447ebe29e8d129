"""Generation engines behind one interface.

blocking       adapter of a blocking engine to the interface of a stream
cuda_graphs    decoding steps of fixed shapes, on a GPU replayed as CUDA graphs
engine_probe   an engine compared with the actor of each version
engines        an engine by its name
graph_capture  capture of steps, tried once an engine
hf_generate    adapter for a `generate` method
interface      the interface of an engine
kv_cache       a key-value cache in preallocated buffers
stop_strings   the end of a response by its text
stops          stop sequences and the end of a response
token_sampler  the next token of each row and the rows that it ends, inside a graph or outside
transformers   the engine over a transformers model: sampling with a key-value cache
vllm           the vLLM engine
weights        the weights of models and engine, replaced by each version
"""
