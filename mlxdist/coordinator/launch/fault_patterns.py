"""The failures of a host by what is printed there: the patterns of OpenSSH, of sh, of Python and of macOS.

The tests hold recorded outputs, and produce some of them again with a real sshd.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pattern:
    """A kind of failure, by what is printed. In the texts, {0} to {2} are the groups of the pattern."""

    kind: str
    shows: str
    what: str
    cure: str
    transient: bool = False


REMOTE_LOGIN = "System Settings, General, Sharing, Remote Login (or: sudo systemsetup -setremotelogin on)"
LOCAL_NETWORK = "System Settings, Privacy & Security, Local Network"

PRIVATE = "/(?:Volumes|Documents|Desktop|Downloads|Library/Mobile Documents)(?:/|$)"

# {ssh}: the ssh command that a person can type; {host}: the host; {login}: user@host. The first match counts.
SSH_PATTERNS = (
    Pattern(
        "filevault",
        r"(?i)system is locked|^\S+: Permission denied \((?:(?:password|keyboard-interactive),?)+\)",
        "it answers with a password only, as a Mac does whose disk FileVault has locked since it was started",
        "Unlock it: type {ssh} and the password of its user, once after each start of that Mac",
        transient=True,
    ),
    Pattern(
        "host key changed",
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "it shows another host key than before: it was installed again, or it is another machine",
        "If you know why, type {forget} and then {ssh} to see the new key",
    ),
    Pattern(
        "host key unknown",
        r"Host key verification failed|No \S+ host key is known",
        "ssh has not seen it before, so its host key is unknown",
        "Type {ssh} once, compare the fingerprint, and answer yes",
    ),
    Pattern(
        "permission denied",
        r"UNPROTECTED PRIVATE KEY FILE[\s\S]*?Permissions \d+ for '([^']+)'",
        "ssh does not use the key {0}, because other users may read it",
        "Type chmod 600 {0}",
    ),
    Pattern(
        "permission denied",
        r"Too many authentication failures",
        "it refused after too many keys were offered",
        "Name the key in ~/.ssh/config: Host {host}, IdentityFile, IdentitiesOnly yes",
    ),
    Pattern(
        "permission denied",
        r"^\S+: Permission denied \(|^Permission denied \(",
        "it does not accept your key, or does not know the user {user}",
        "Type ssh-copy-id {login}, or correct the user; a key with a passphrase is loaded by ssh-add",
    ),
    Pattern(
        "unknown name",
        r"Could not resolve hostname (\S+): ",
        "no address is known for the name {0}",
        "Check the name (ping {host}); a Mac answers to the name in System Settings, General, Sharing, with .local",
        transient=True,
    ),
    Pattern(
        "refused",
        r"connect to host \S+ port (\d+): Connection refused",
        "it is there, and nothing answers at its port {0}",
        f"Turn ssh on at that Mac: {REMOTE_LOGIN}",
        transient=True,
    ),
    Pattern(
        "local network",
        r"connect to host \S+ port \d+: (No route to host|Network is unreachable|Network is down|Host is down)",
        "there is no way to it ({0}): it is off, asleep or unplugged, or macOS keeps this terminal from the network",
        f"Wake it and try {{ssh}}; on a Mac, allow this terminal in {LOCAL_NETWORK}",
        transient=True,
    ),
    Pattern(
        "tunnel refused",
        r"remote port forwarding failed",
        'its ssh server lets no tunnel through, and transport = "ssh" needs one',
        'Set AllowTcpForwarding yes in /etc/ssh/sshd_config there, or transport = "tcp" for it in hosts.toml',
    ),
    Pattern(
        "unreachable",
        r"(?i)timed out|did not respond|kex_exchange_identification|ssh_dispatch_run_fatal"
        r"|Connection (?:reset|closed) by|connect to host \S+ port \d+: |not responding|closed by remote host"
        r"|Broken pipe|client_loop",
        "the connection was not made, or was lost",
        "See whether it is on and awake, and try {ssh}",
        transient=True,
    ),
    Pattern(
        "ssh configuration",
        r"(?i)(bad configuration option.*|can't open user config file.*|terminating, \d+ bad configuration.*"
        r"|.*bad owner or permissions.*|unsupported option.*|unknown option.*|usage: ssh)",
        "ssh does not accept its configuration: {0}",
        "Correct ~/.ssh/config, or ssh_options in hosts.toml",
    ),
)

MLXDIST_MISSING = Pattern(
    "mlxdist missing",
    r"No module named '?mlxdist\b|No package metadata was found for",
    "its interpreter has no mlxdist, or not all that it needs",
    "Type mlxdist sync --hosts hosts.toml run.toml, or launch with --sync",
)

COMMAND_PATTERNS = (
    Pattern(
        "disk full",
        r"No space left on device|\[Errno 28\]|Disc quota exceeded|Disk quota exceeded",
        "its disk is full",
        "Free some space there; mlxdist sync --clean removes environments that are not used any more",
    ),
    Pattern(
        "privacy",
        rf"([^\s:'\"]*{PRIVATE}[^:'\"\n]*)['\"]?: Operation not permitted"
        rf"|Operation not permitted: ['\"]([^'\"\n]*{PRIVATE}[^'\"\n]*)",
        "macOS keeps programs that ssh starts from this folder {0}{1}",
        "Take a folder outside Documents, Desktop, Downloads and external volumes, or allow it: System Settings, "
        "General, Sharing, Remote Login, Allow full disk access for remote users",
    ),
    MLXDIST_MISSING,
    Pattern(
        "no metal",
        r"(?i)no metal device|failed to load device|metal\S* no (?:default )?device|MTLCreateSystemDefaultDevice",
        "there is no Metal device in this session: a virtual machine, or a Mac without a GPU that mlx can use",
        "Log in to that Mac once at its screen, or leave it out",
    ),
    Pattern(
        "local network",
        r"\[Errno 65\]|\[Errno 113\]|No route to host",
        "it has no way to the coordinator: macOS keeps mlxdist there from the local network, or a cable is out",
        f'Set transport = "ssh" for it in hosts.toml, or allow its Python in {LOCAL_NETWORK}',
        transient=True,
    ),
    Pattern(
        "port blocked",
        r"cannot reach the coordinator at (\S+): .*",
        "it does not reach the coordinator at {0}: a firewall is between them, or the port is blocked",
        'Allow incoming connections for Python on the coordinator, or set transport = "ssh" for it in hosts.toml',
        transient=True,
    ),
    Pattern(
        "model missing",
        r"model ('[^'\n]+') cannot be loaded|no model at (\S.*)",
        "it does not have the model {0}{1}",
        "Type mlxdist sync --hosts hosts.toml run.toml (or launch with --sync), or set model for it in hosts.toml",
    ),
    Pattern(
        "model differs",
        r"its model differs|model hash",
        "its model is another one than the coordinator's",
        "Type mlxdist sync --hosts hosts.toml run.toml, or launch with --sync",
    ),
)

SHELL_TALKS = Pattern(
    "shell talks",
    "",
    "its login shell prints text when it starts, as '{0}'",
    "mlxdist does not mind, but rsync and scp do: print only when a person is there, as in: case $- in *i*) … esac",
)
