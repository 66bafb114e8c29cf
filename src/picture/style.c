/* The style sheet of all pictures. */
#include "charts.h"

const char picture_style[] =
    ":root,svg{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--soft:#57606a;--line:#c3cad1;--box:#f2f4f6;"
    "--forward:#bcd9f5;--backward:#1d4f8c;--weight:#c77d11;--on-light:#10263d;--on-dark:#fff;--limit:#b3261e}\n"
    "@media (prefers-color-scheme:dark){:root,svg{--paper:#14181d;--ink:#e8ebee;--soft:#a3adb8;--line:#4a535d;"
    "--box:#1e242b;--forward:#34608f;--backward:#c4ddf7;--weight:#d99431;--on-light:#fff;--on-dark:#0d2036;"
    "--limit:#ff8a80}}\n"
    "svg{background:var(--paper);font-family:system-ui,\"Segoe UI\",Helvetica,Arial,\"DejaVu Sans\",sans-serif}\n"
    "svg text{fill:var(--ink)}svg text.soft{fill:var(--soft)}svg text.strong{font-weight:600}\n"
    "svg text.on-forward{fill:var(--on-light)}svg text.on-backward,svg text.on-weight{fill:var(--on-dark)}\n"
    ".grid{stroke:var(--line);stroke-width:1}.frame{fill:none;stroke:var(--line)}.axis{stroke:var(--soft)}\n"
    ".task{stroke:var(--paper);stroke-width:.6}\n"
    ".forward,.activations,.plain{fill:var(--forward)}.backward,.parameters,.best{fill:var(--backward)}\n"
    ".weight,.waiting{fill:var(--weight)}.once,.measured{fill:var(--paper);stroke:var(--ink);stroke-width:1}\n"
    ".limit{stroke:var(--limit);stroke-width:2;fill:none}\n"
    ".line{fill:none;stroke:var(--backward);stroke-width:1.5}.line.second{stroke:var(--weight);stroke-dasharray:6 3}\n"
    ".loss,.point{fill:var(--backward)}.validation{fill:var(--weight)}\n"
    ".marker{stroke:var(--limit);stroke-width:1.5;stroke-dasharray:5 4}\n"
    ".box{fill:var(--box);stroke:var(--soft)}.node{fill:var(--paper);stroke:var(--line)}\n"
    ".device{fill:var(--forward);stroke:var(--soft);stroke-width:.5}.link{stroke:var(--backward);fill:none}\n"
    ".port{fill:var(--backward)}.cell{fill:var(--box);stroke:var(--line)}\n";
