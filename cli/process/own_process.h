#pragma once

namespace oomdiag {

/// Opens /dev/null in the place of a stdin, stdout or stderr that we were started without: else what we open ourselves, as a
/// pipe, gets its number. Programs that we start have none either.
void open_missing_streams();

/// From here on a write to a pipe that nobody reads fails, and does not end us. Programs that we start have their SIGPIPE as
/// we had it.
void ignore_broken_pipes();
/// In a child: takes that back.
void restore_broken_pipes();

/// Ends this process by a signal, without a core dump. Returns where that cannot be, as in the first process of a container.
void end_by(int signal);

}  // namespace oomdiag
