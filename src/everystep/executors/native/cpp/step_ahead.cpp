// What is begun before it is asked for, by the members but the caller.
#include <new>

#include "step.h"

namespace everystep {

// Whether the position after each row is one that the model can place.
bool Runner::can_go_on(const Work& work) const {
    if (!model_.positions) return true;
    for (int64_t feed = 0; feed < work.feeds; ++feed)
        if (work.starts[feed] + work.counts[feed] >= model_.places) return false;
    return true;
}

// The members but the caller begin with what most likely comes next.
void Runner::run_ahead(const Work& work) {
    if (crew_->size() == 1 || work.feeds > kMostTokens || !can_go_on(work)) return;
    if (!Guess::follows(work) || !guess_.worth_it()) return;
    try {
        start_ahead(guess_.after(work, model_.width, model_.vocabulary));
    } catch (const std::bad_alloc&) {
        ahead_.reset();  // It need not be begun before it is asked for.
    }
}

void Runner::start_ahead(const Work& next) {
    list_wanted(next);
    ahead_.emplace(make_part(next, 0));
    ahead_->slices = kSlices;
    make_room(*ahead_);
    crew_->start([this](Member& member) {
        embed(member, *ahead_);
        run_layers(member, *ahead_, 0);
    });
}

// Whether the work is what was begun: then it is completed and reported, and else it is given up.
bool Runner::was_ahead(const Work& work, int threads) {
    if (!ahead_) return false;
    const bool is_this = crew_->size() == threads && guess_.covers(work);
    guess_.learn(is_this);
    if (!is_this) {
        give_up_ahead();
        return false;
    }
    crew_->join([this](Member& member, int64_t door) { run_layers(member, *ahead_, door); });
    ahead_.reset();
    guess_.report(work);
    return true;
}

void Runner::give_up_ahead() {
    forget_lost_crew();
    if (ahead_) crew_->give_up();
    ahead_.reset();
}

}  // namespace everystep
