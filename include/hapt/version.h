#ifndef HAPT_VERSION_H
#define HAPT_VERSION_H

#define HAPT_VERSION "0.1.0"

#endif
