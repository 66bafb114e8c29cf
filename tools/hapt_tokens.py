#!/usr/bin/env python3
"""Text becomes a data file for hapt, by the tokenizer of a published model (Hugging Face).

usage: hapt_tokens.py --tokenizer FOLDER --output tokens.h5 [--held-out held-out.h5] [--share 0.05] FILE...
       hapt_tokens.py --tokenizer FOLDER --encode TEXT
       hapt_tokens.py --tokenizer FOLDER --decode < lines

FOLDER holds the tokenizer of the model (tokenizer.json). A FILE that ends in .jsonl has a document per line, an object with "text", or with
"messages" for the chat template of the tokenizer; any other file is one document of UTF-8 text. The token that ends a text follows each
document. --held-out: about --share of the documents, evenly spaced, go to a second file for --validation-data; the end of the text, if there
is one document only.

--encode prints the tokens of a text as "5,17,3", for hapt generate --prompt-tokens; as in training data, no token that begins a text is
added. --decode reads such lines, which hapt generate prints, and
prints their texts.

The output is /tokens [n], uint32, in the order of the documents. hapt draws rows from it by seed and step. Needs h5py and tokenizers;
"messages" need transformers."""
import argparse
import json
import os
import sys

BLOCK = 1 << 20  # tokens that are kept before they are written


def fail(text, hint):
    sys.exit("hapt_tokens: error: %s\nhint: %s" % (text, hint))


try:
    from tokenizers import Tokenizer
except ImportError as missing:
    fail(str(missing), "python3 -m pip install tokenizers")
try:
    import h5py
    import numpy
except ImportError:
    h5py = None


def need_h5py():
    if h5py is None:
        fail("data files need h5py", "python3 -m pip install h5py")


def documents(path):
    """The texts, or lists of messages, of a file."""
    with open(path, encoding="utf-8") as file:
        if not path.endswith(".jsonl"):
            yield file.read()
            return
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError as error:
                fail("%s, line %d: %s" % (path, number, error), "each line of a .jsonl file is a JSON object")
            found = entry.get("text", entry.get("messages")) if isinstance(entry, dict) else None
            if not isinstance(found, (str, list)):
                fail("%s, line %d has neither \"text\" nor \"messages\"" % (path, number), "rename the field that holds the text")
            yield found


class Words:
    """The tokenizer of a folder."""

    def __init__(self, folder):
        path = os.path.join(folder, "tokenizer.json")
        if not os.path.exists(path):
            fail("%s does not exist" % path, "save the tokenizer with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)")
        self.folder, self.tokenizer, self.chat = folder, Tokenizer.from_file(path), None
        self.end = self.find_end()

    def find_end(self):
        """The token that ends a text, by the tokenizer's settings or the model's; None: there is none."""
        for name, key in (("tokenizer_config.json", "eos_token"), ("generation_config.json", "eos_token_id"), ("config.json", "eos_token_id")):
            path = os.path.join(self.folder, name)
            value = json.load(open(path, encoding="utf-8")).get(key) if os.path.exists(path) else None
            value = value.get("content") if isinstance(value, dict) else value[0] if isinstance(value, list) and value else value
            value = self.tokenizer.token_to_id(value) if isinstance(value, str) else value
            if isinstance(value, int):
                return value
        return None

    def tokens(self, document):
        if isinstance(document, str):
            found = self.tokenizer.encode(document, add_special_tokens=False).ids
        else:
            if self.chat is None:
                try:
                    from transformers import AutoTokenizer
                except ImportError as missing:
                    fail(str(missing), "chat messages need transformers: python3 -m pip install transformers")
                self.chat = AutoTokenizer.from_pretrained(self.folder)
            found = self.chat.apply_chat_template(document, tokenize=True, return_dict=False)
        if self.end is not None and (not found or found[-1] != self.end):
            found = list(found) + [self.end]
        return found


class Stream:
    """/tokens of a new file, written in blocks; it appears under its name when it is complete."""

    def __init__(self, path):
        self.path, self.partial, self.kept, self.count = path, path + ".partial", [], 0
        self.file = h5py.File(self.partial, "w")
        self.tokens = self.file.create_dataset("tokens", (0,), numpy.uint32, maxshape=(None,), chunks=(1 << 16,))

    def add(self, tokens):
        self.kept.extend(tokens)
        if len(self.kept) >= BLOCK:
            self.write()

    def write(self):
        self.tokens.resize((self.count + len(self.kept),))
        self.tokens[self.count:] = numpy.array(self.kept, numpy.uint32)
        self.count, self.kept = self.count + len(self.kept), []

    def remove_partial(self):
        """After a failure."""
        self.file.close()
        if os.path.exists(self.partial):
            os.remove(self.partial)

    def close(self):
        self.write()
        self.file.close()
        os.replace(self.partial, self.path)
        print("%s: %d tokens" % (self.path, self.count))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--output")
    parser.add_argument("--encode", metavar="TEXT")
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--held-out")
    parser.add_argument("--share", type=float)
    parser.add_argument("file", nargs="*")
    options = parser.parse_args()
    if (options.output is not None) + (options.encode is not None) + options.decode != 1:
        fail("give one of --output, --encode and --decode", "hapt_tokens.py --help")
    if bool(options.file) != bool(options.output):
        fail("--output needs a FILE, the others take none", "hapt_tokens.py --help")
    if not options.output and (options.held_out or options.share is not None):
        fail("--held-out and --share need --output", "hapt_tokens.py --help")
    if options.encode is not None:
        print(",".join(map(str, Words(options.tokenizer).tokenizer.encode(options.encode, add_special_tokens=False).ids)))
        return
    if options.decode:
        decode(Words(options.tokenizer))
        return
    need_h5py()
    options.share = 0.05 if options.share is None else options.share
    if not 0 < options.share < 1:
        fail("--share %g is not between 0 and 1" % options.share, "0.05 is one document of twenty")
    for path in filter(None, (options.output, options.held_out)):
        if os.path.exists(path):
            fail("%s exists" % path, "remove it, or give another name")
    streams = [Stream(path) for path in (options.output, options.held_out) if path]
    try:
        write(options, Words(options.tokenizer), streams)
    finally:
        for stream in streams:
            stream.remove_partial()


def decode(words):
    for line in sys.stdin:
        try:
            print(words.tokenizer.decode([int(token) for token in line.split(",")]))
        except (ValueError, OverflowError):
            fail("\"%.40s\" is no list of tokens" % line.strip(), "lines look like 5,17,3")


def write(options, words, streams):
    """Each document goes to the first stream, or to the second one, if there is one and its share is due."""
    due, number, only = 0.0, 0, None

    def place(tokens):
        nonlocal due
        due += options.share if len(streams) > 1 else 0
        held_out = due >= 1
        due -= held_out
        streams[held_out].add(tokens)

    for path in options.file:
        for document in documents(path):
            number += 1
            tokens = words.tokens(document)
            if number == 1:
                only = tokens
                continue
            if number == 2:
                place(only)
            place(tokens)
    if number == 1:
        end = len(only) - (max(1, int(options.share * len(only))) if len(streams) > 1 else 0)
        streams[0].add(only[:end])
        if len(streams) > 1:
            streams[1].add(only[end:])
    for stream in streams:
        if not stream.kept and not stream.count:
            fail("%s would be empty: %d documents" % (stream.path, number), "give more text, or a larger --share")
    for stream in streams:
        stream.close()


main()
