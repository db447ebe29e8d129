"""The base of every process of an instance; no torch.

child_entry         entry of a child process
child_process       a child process, started and watched
control             the control socket
evaluation_plan     the held-out prompts of a configuration, and their tickets
forking             forks of this process that run one function
forkserver          the supervisor's side of the forkserver
forkserver_process  the forkserver, the only module here that loads torch
former_layout       the state directory of earlier releases, moved into the folders of its runs
latest_checkpoint   the latest checkpoint, and whether a start resumes from it
lifeline            the end of a child with its parent
lock                the lock and record of an instance
messages            every message between the processes
pause               whether tickets are issued
role                a role's folder, metrics, reports and SIGTERM
run_folder          the folder of a run
run_start           the run's part of a start
signals             signals that end a process; processes that a signal has stopped
transport           ZeroMQ between the processes of an instance
workspace           an instance's folder in shared memory
"""
