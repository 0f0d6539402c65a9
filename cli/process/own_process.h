#pragma once

namespace oomdiag {

/// Opens /dev/null in the place of a stdin, stdout or stderr that we were started without: else what we open ourselves, as a
/// pipe, gets its number. Programs that we start have none either.
void open_missing_streams();

/// Children that end stay until we wait for them, also where our parent ignored SIGCHLD, as a server may: else nobody learns
/// how they ended.
void keep_ended_children();

/// From here on a write to a pipe that nobody reads fails, and does not end us.
void ignore_broken_pipes();

/// In a child that becomes another program: its signals are as we had them before either of these.
void restore_inherited_signals();

/// Ends this process by a signal, without a core dump and without flushing what it printed. Returns where that cannot be, as in
/// the first process of a container.
void end_by(int signal);

}  // namespace oomdiag
