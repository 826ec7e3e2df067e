"""How replicas are started and spoken to; processes of this machine and actors of Ray each have a launcher."""

from __future__ import annotations

from typing import Any, Protocol

from cbatch.base.config import EngineConfig


class ReplicaConnection(Protocol):
    """One life of a replica."""

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Calls a method of the `Replica`, and returns what it returns. One thread calls at a time.

        The first call waits until the model is loaded, if it is not yet. `timeout_s` may be infinite.

        Raises WorkerDied if there is no answer for any reason, among them `kill` on another thread meanwhile; and the
        CbatchError that the replica raised, while it loaded or in the method. After WorkerDied nothing is called any
        more but `kill`.
        """
        ...

    def kill(self) -> None:
        """Ends this life at once, without grace. Returns when it holds no memory and no device any more.

        May be called on any thread, also while another one waits in `call`, and twice.
        """
        ...


class ReplicaLauncher(Protocol):
    """Starts replicas, whose numbers go from 0 on.

    num_replicas: how many there are to be
    """

    num_replicas: int

    def name(self, number: int) -> str:
        """What people call the replica, such as `replica 2`."""
        ...

    def start(self, number: int, config: EngineConfig) -> ReplicaConnection:
        """Begins a life of a replica, and returns without waiting for its model. Called on several threads at once.

        Raises WorkerDied if the replica cannot even be started now, and CbatchError if it never can.
        """
        ...

    def close(self) -> None:
        """Ends all that was started and still lives, and frees what the launcher holds. May be called twice."""
        ...
