"""The base of every process of an instance; no torch.

actor_start         the start of a role on another machine of a cluster
checkpoint_note     a checkpoint's description of itself, and its verification
child_entry         entry of a child process
child_process       a child process, started and watched
control             the control socket
engine_forkserver   the forkserver of vLLM's engines, and the worker's side of it
evaluation_plan     the held-out prompts of a configuration, and their tickets
forking             forks of this process that run one function, and of a forkserver on request
forkserver          the supervisor's side of the forkserver
forkserver_process  the forkserver; it and that of the engines are the only modules here that load torch
forkserver_refusal  the reason why a forkserver cannot serve, remembered for the next start
import_watch        the module whose import started a thread
latest_checkpoint   the latest checkpoint, and whether a start resumes from it
lifeline            the end of a child with its parent
link                messages between two processes over a socket
lock                the lock and record of an instance
messages            every message between the processes
pause               whether tickets are issued
peer                one side of a conversation with a process that may be restarted
pool                processes that run code of the user, replaced when they end
pool_process        the forkserver of a pool, and the start of a process
ray_cluster         a gateway's connection to its Ray cluster, its waits for cluster and room, the begin of its actor
role                a role's folder, metrics, reports and SIGTERM
role_libraries      the import of the roles' libraries, without packages of no use to them
run_folder          the folder of a run
run_inputs          digests of the files that a run reads
run_start           the run's part of a start
signals             signals that end a process; processes that a signal has stopped
transport           ZeroMQ between the processes of an instance
vllm_variables      the variables of a process that imports vLLM
workspace           an instance's folder in shared memory
"""
